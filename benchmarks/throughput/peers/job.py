"""What a contestant is asked to train, and on which tokens. Imports neither JAX nor torch, which not all have."""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

BOS_ID = 0
"""What stands before the first token of each row."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A decoder of RMSNorm, RoPE, grouped queries and SwiGLU, untied, without biases; names as in train.ModelConfig."""

    vocab: int
    d_model: int
    layers: int
    n_kv: int
    n_q_per_kv: int
    d_head: int
    d_ff: int
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def heads(self) -> int:
        return self.n_kv * self.n_q_per_kv

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name: shape, as train.py has them, stacked over layers, with the dims that a product sums over first."""
        n, model, hidden = self.layers, self.d_model, self.d_ff
        return {
            "embed": (self.vocab, model),
            "attention_norm": (n, model),
            "w_q": (n, model, self.n_kv, self.n_q_per_kv, self.d_head),
            "w_k": (n, model, self.n_kv, self.d_head),
            "w_v": (n, model, self.n_kv, self.d_head),
            "w_o": (n, self.n_kv, self.n_q_per_kv, self.d_head, model),
            "mlp_norm": (n, model),
            "w_gate": (n, model, hidden),
            "w_up": (n, model, hidden),
            "w_down": (n, hidden, model),
            "final_norm": (model,),
            "unembed": (self.vocab, model),
        }

    def products(self, t: int = 1) -> list[tuple[int, int, int]]:
        """(inputs, outputs, how often) of each product with a weight in a forward pass, on one of `t` devices."""
        q, kv, hidden = self.heads * self.d_head // t, self.n_kv * self.d_head // t, self.d_ff // t
        into = [
            (self.d_model, q),
            (self.d_model, kv),
            (self.d_model, kv),
            (self.d_model, hidden),
            (self.d_model, hidden),
        ]
        out_of = [(q, self.d_model), (hidden, self.d_model)]
        return [(*product, self.layers) for product in into + out_of] + [(self.d_model, self.vocab // t, 1)]

    @property
    def matmul_parameters(self) -> int:
        """Those of all products with weights."""
        return sum(inputs * outputs * n for inputs, outputs, n in self.products())

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights().values())


@dataclasses.dataclass(frozen=True)
class Job:
    """One contestant's task; travels as JSON.

    Attributes:
        contestant: a module of benchmarks/throughput/peers.
        rows, length: of a batch, over all devices; each row is one document.
        microbatches: parts of the batch that go through the model one after the other; of ours only.
        dtype: bf16: products in bf16, weights and optimizer state in f32. f32: all in f32.
        platform: cpu or gpu.
        d, t: the mesh. Peers know d alone, as plain data parallelism over d·t devices.
        config: of ours: a file of configs/, of which all holds that the job does not say otherwise.
        settings: of ours: Hydra overrides, as on train.py's command line; they come last.
    """

    contestant: str
    shapes: Shapes
    rows: int
    length: int
    dtype: str = "f32"
    platform: str = "cpu"
    d: int = 1
    t: int = 1
    microbatches: int = 1
    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    config: str = "local_test_synthetic"
    settings: tuple[str, ...] = ()
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def devices(self) -> int:
        return self.d * self.t

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        found: dict[str, Any] = json.loads(text)
        found["shapes"], found["settings"] = Shapes(**found["shapes"]), tuple(found["settings"])
        return Job(**found)


BATCHES = 4
"""Different batches, which are on the devices before anything is timed, and take turns."""


def batches(job: Job) -> Iterator[np.ndarray]:
    """uint32[rows, length] each: the ids to predict."""
    rng = np.random.default_rng(job.seed)
    for _ in range(BATCHES):
        yield rng.integers(0, job.shapes.vocab, (job.rows, job.length)).astype(np.uint32)


def inputs_of(targets: np.ndarray) -> np.ndarray:
    """The token before each target."""
    return np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)


def random_weights(shapes: Shapes, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights for tests that begin with the same in all contestants; norms' differ from 1."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = rng.standard_normal(shape).astype(np.float32)
        return 1 + 0.1 * noise if "norm" in name else noise / np.float32(np.sqrt(shapes.d_model))

    return {name: draw(name, shape) for name, shape in shapes.weights().items()}
