"""seqax: the step of train.py of a checkout (github.com/MatX-inc/seqax), in an environment of its
own.

The products are in bf16, as its source has them, whatever the dtype of the job.
"""

import dataclasses
import importlib
import sys
import types
from pathlib import Path

import numpy as np

from bench.throughput.peers.job import Job, Trainer, batches, starts_of

ROOT = Path(__file__).resolve().parents[3]
UNUSED = {
    "clearml": ("Logger", "Task"),
    "datasets": ("load_dataset",),
    "gcsfs": (),
    "torch": (),
    "torch.utils": (),
}
UNUSED |= {"torch.utils.data": ("DataLoader",), "transformers": ("AutoTokenizer",)}
"""Modules that train.py imports and its step does not use, and the names that it takes from
them."""


def load(checkout: str):
    """The module train of the checkout."""
    for module, names in UNUSED.items():
        sys.modules[module] = found = types.ModuleType(module)
        for name in names:
            setattr(found, name, None)
    # Without our root, whose shardlib has the name of theirs.
    sys.path[:] = [checkout, *(path for path in sys.path if Path(path).resolve() != ROOT)]
    train = importlib.import_module("train")
    for module in UNUSED:  # einops would use torch
        del sys.modules[module]
    assert str(train.__file__).startswith(checkout), f"{train.__file__} is not of {checkout}"
    return train


class Contestant(Trainer):
    """The trainer of the checkout that the job names."""

    def __init__(self, job: Job, weights: dict[str, np.ndarray]):
        self.train = load(job.checkout)  # sets variables of the environment, before JAX is imported
        import jax
        from jax.experimental import mesh_utils

        jax.config.update("jax_threefry_partitionable", True)
        shapes = dataclasses.asdict(job.shapes)
        del shapes["norm_epsilon"]
        shapes["rope_max_timescale"] = shapes.pop("rope_base")
        self.h = self.train.Hparams(**shapes)
        adam = {"adam_b1": job.b1, "adam_b2": job.b2, "adam_eps": job.epsilon, "adam_eps_root": 0.0}
        adam |= {
            "weight_decay": job.weight_decay,
            "learning_rate": job.learning_rate,
            "warmup_steps": 0,
            "steps": 1000,
        }
        # a constant rate
        adam |= {"steps_for_lr": 1000, "cosine_learning_rate_final_fraction": 1.0}
        self.hparams = self.train.TrainingHparams(**adam, tokens=None, seed=job.seed)
        devices = mesh_utils.create_device_mesh([job.d, job.t], jax.devices()[: job.devices])
        self.mesh = jax.sharding.Mesh(devices, ("d", "t"))
        with self.mesh:
            init = jax.jit(lambda key: self.train.State.init(self.h, key))
            self.state = init(jax.random.PRNGKey(job.seed))
            self.state.weights = jax.tree.map(
                lambda x, like: jax.device_put(x.astype(np.float32), like.sharding),
                self.of_seqax(weights, job),
                self.state.weights,
            )
            by_row = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec("d"))
            self.batches = [
                jax.device_put(
                    self.train.TokenBatch(targets=ids, is_seq_start=starts_of(ids)), by_row
                )
                for ids in batches(job)
            ]

    def of_seqax(self, weights: dict[str, np.ndarray], job: Job):
        """Weights by the names of Shapes as those of seqax, whose attention does not divide by
        √d_head.
        """
        w = weights
        layers = {
            "ln1": w["attention_norm"],
            "ln2": w["mlp_norm"],
            "w_gate": w["w_gate"],
            "w_up": w["w_up"],
        }
        # Q K D
        w_q, w_o = (np.swapaxes(x, -3, -2) for x in (w["w_q"], np.moveaxis(w["w_o"], -1, 1)))
        layers |= {
            "w_q": w_q * job.shapes.d_head**-0.5,
            "w_kv": np.stack([w["w_k"], w["w_v"]], axis=1),
        }
        layers |= {"w_o": w_o, "w_down": np.swapaxes(w["w_down"], 1, 2)}  # M Q K D
        whole = {"embed": w["embed"], "unembed": w["unembed"], "final_layer_norm": w["final_norm"]}
        return self.train.Model(**whole, transformer=self.train.Transformer(**layers))

    def run(self, batch):
        with self.mesh:
            number = np.uint32(self.steps)
            self.state, metrics = self.train.training_step(
                self.state, number, self.h, self.hparams, batch
            )
        return metrics.loss
