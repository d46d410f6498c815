"""The model, the tokens and the steps of a contestant.

Imports neither JAX nor torch: a contestant may lack them.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.common import host_peak

BOS_ID = 0
"""Token before the first one of each sequence."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of a decoder of RMSNorm, RoPE, grouped queries and SwiGLU, untied, without biases.

    Names are those of modeling.settings.ModelConfig.
    """

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
        """Shapes by name, as in train.py: stacked over layers, the dims that a product sums over
        first.
        """
        n = self.layers
        model = self.d_model
        hidden = self.d_ff
        kv = (self.n_kv, self.d_head)
        q = self.n_kv, self.n_q_per_kv, self.d_head
        found = {"embed": (self.vocab, model), "attention_norm": (n, model), "w_q": (n, model, *q)}
        found |= {
            "w_k": (n, model, *kv),
            "w_v": (n, model, *kv),
            "w_o": (n, *q, model),
            "mlp_norm": (n, model),
        }
        found |= {
            "w_gate": (n, model, hidden),
            "w_up": (n, model, hidden),
            "w_down": (n, hidden, model),
        }
        return found | {"final_norm": (model,), "unembed": (self.vocab, model)}

    def random_weights(self, seed: int) -> dict[str, np.ndarray]:
        """Weights of a run's start, in f32; norms are 1."""
        rng = np.random.default_rng(seed)
        found = {}
        for name, shape in self.weights().items():
            if "norm" in name:
                found[name] = np.ones(shape, np.float32)
            else:
                found[name] = rng.standard_normal(shape, np.float32) * self.d_model**-0.5
        return found

    def products(self, t: int = 1) -> list[tuple[int, int, int]]:
        """(inputs, outputs, count) of each product with a weight in a forward pass, on one of `t`
        devices.
        """
        model = self.d_model
        hidden = self.d_ff // t
        q, kv = self.heads * self.d_head // t, self.n_kv * self.d_head // t
        of_layer = [(model, q), (model, kv), (model, kv), (q, model)]
        of_layer += [(model, hidden), (model, hidden), (hidden, model)]
        return [(*product, self.layers) for product in of_layer] + [(model, self.vocab // t, 1)]

    @property
    def matmul_parameters(self) -> int:
        """Number of the parameters that are in products."""
        return sum(inputs * outputs * n for inputs, outputs, n in self.products())

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights().values())


@dataclasses.dataclass(frozen=True)
class Job:
    """The task of one contestant.

    Attributes:
        contestant: a module of bench/throughput/peers.
        sequences, length: number of sequences of a batch, over all devices, and of their tokens.
            Each is one document.
        dtype: bf16: products in bf16, weights and optimizer state in f32. f32: all in f32.
        platform: cpu or gpu.
        r, d, t: the mesh.
        config: for ours, a file of configs/, for all settings that are not in the job.
        overrides: for ours, further settings, with spaces between them.
        save: for plain JAX. everything: what its backward pass needs; marked: what ours keeps, and
            the rest again.
        checkout: for seqax, the directory of its source, with an environment .venv.
    """

    contestant: str
    shapes: Shapes
    sequences: int
    length: int
    dtype: str = "f32"
    platform: str = "cpu"
    r: int = 1
    d: int = 1
    t: int = 1
    learning_rate: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    config: str = "local_test_synthetic"
    overrides: str = ""
    save: str = "everything"
    checkout: str = ""
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def devices(self) -> int:
        return self.r * self.d * self.t

    @property
    def attention_share(self) -> float:
        """FLOPs of causal attention over those of the products with weights."""
        c = self.shapes
        return c.layers * c.heads * c.d_head * self.length / c.matmul_parameters

    def to_json(self) -> str:
        """For the command line of its process."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Job":
        found: dict[str, Any] = json.loads(text)
        found["shapes"] = Shapes(**found["shapes"])
        return Job(**found)


BATCHES = 4
"""Number of different batches. They are on the devices before the timing, and take turns."""


def batches(job: Job) -> Iterator[np.ndarray]:
    """Yields the ids to predict, uint32[sequences, length]."""
    rng = np.random.default_rng(job.seed)
    for _ in range(BATCHES):
        yield rng.integers(0, job.shapes.vocab, (job.sequences, job.length)).astype(np.uint32)


def inputs_of(targets: np.ndarray) -> np.ndarray:
    """The token before each target."""
    return np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS_ID)


def starts_of(targets: np.ndarray) -> np.ndarray:
    """Which tokens begin a document: the first of each sequence."""
    return np.broadcast_to(np.arange(targets.shape[1]) == 0, targets.shape)


class Trainer:
    """A contestant.

    It has `batches`, and `run(batch)`, which starts a step and returns its loss on the device.
    """

    steps = 0
    batches: Any
    run: Callable[[Any], Any]

    def step(self) -> Any:
        loss = self.run(self.batches[self.steps % len(self.batches)])
        self.steps += 1
        return loss

    def wait(self, losses: list) -> list[float]:
        """Waits for the steps that returned these losses."""
        return [float(loss) for loss in losses]

    def peak(self) -> int:
        """Peak of the memory that it is compared by, in bytes: here of the process."""
        return host_peak()
