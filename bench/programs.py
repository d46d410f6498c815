"""Detects whether a change of the source changes what runs: a hash of each program of each shipped configuration.

    python -m bench.programs before.json                          # on one commit
    python -m bench.programs after.json --against before.json     # on another

Traces the steps of training, evaluation and sampling for every file in configs/ and for settings that change the
program (gathers, recomputation, attention paths, Muon, FP8, schedules, GPT-2 with dropout), on several meshes of eight
simulated devices. shardlib/program_hash.py defines the hash. Prints what differs; exits with 1 if anything does.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import train
from bench.steps import CONFIGS, load, simulate_devices, state_shapes
from shardlib.program_hash import hash_of
from shardwright.cluster.devices import make_mesh
from shardwright.modeling.model import load_model
from shardwright.run.config import Config, check_divides
from shardwright.sampling.cache import Texts
from shardwright.sampling.drawing import Settings
from shardwright.sampling.sampler import Sampler
from shardwright_data.loader import TokenBatch, batch_shapes

DEVICES = 8
MESHES = {  # p, r, d, t
    "1": (1, 1, 1, 1),
    "d=8": (1, 1, 8, 1),
    "r=2 d=2 t=2": (1, 2, 2, 2),
    "p=2 d=2 t=2": (2, 1, 2, 2),
    "p=4 t=2": (4, 1, 1, 2),
}
STAGES = ["training.microbatches=4", "pipeline.layers_per_stage=balanced"]
"""Overrides on meshes with p, for configurations without stages."""

DEMO, GPT2, PIPELINE = "local_test_synthetic", "local_gpt2", "local_test_pipeline"
DEEP = ["model.layers=4", "training.microbatches=2"]
ALL_PARTS = ["model.qk_norm=true", "model.tied_embeddings=true", "model.logit_softcap=30", "optimizer.z_loss=1e-4"]
GATHERED, NOT_GATHERED = "training.gather_weights=step", "training.gather_weights=layer"
VARIED = {
    "microbatches": (DEMO, ["training.microbatches=4"]),
    "microbatches, gathered": (DEMO, ["training.microbatches=4", GATHERED]),
    "gathered": (DEMO, [GATHERED]),
    "bf16": (DEMO, ["training.compute_dtype=bf16"]),
    "einsum": (DEMO, ["training.attention=einsum", "training.seq_len=512"]),
    "blockwise": (DEMO, ["training.attention=blockwise", "training.seq_len=512"]),
    "long": (DEMO, ["training.seq_len=512"]),
    "no document mask": (DEMO, ["training.document_mask=false"]),
    "no document mask, long": (DEMO, ["training.document_mask=false", "training.seq_len=512"]),
    "fp8": (DEMO, ["training.fp8=true", "training.compute_dtype=bf16"]),
    "fp8, gpt2": (GPT2, ["training.fp8=true", "training.compute_dtype=bf16"]),
    "no loop": (DEMO, [*DEEP, "training.unroll=null"]),
    "unroll 2": (DEMO, [*DEEP, "training.unroll=2"]),
    "unroll 3": (DEMO, [*DEEP, "training.unroll=3"]),
    "save nothing": (DEMO, ["training.save=nothing"]),
    "save dots": (DEMO, ["training.save=dots"]),
    "save everything": (DEMO, ["training.save=everything"]),
    "loss in chunks": (DEMO, ["training.loss_chunk=16"]),
    "muon": (DEMO, ["optimizer=muon"]),
    "muon, gathered": (DEMO, ["optimizer=muon", *DEEP, GATHERED]),
    "all parts": (DEMO, [*ALL_PARTS, *DEEP]),
    "all parts, gathered": (DEMO, [*ALL_PARTS, *DEEP, GATHERED]),
    "rope scaling": (DEMO, ["+model.rope_scaling.kind=llama3", "+model.rope_scaling.factor=8"]),
    "gpt2, dropout": (GPT2, ["model.dropout=0.1", *DEEP]),
    "gpt2, dropout, not gathered": (GPT2, ["model.dropout=0.1", *DEEP, NOT_GATHERED]),
    "gpt2, blockwise, gathered": (GPT2, ["training.attention=blockwise", "model.dropout=0", *DEEP, GATHERED]),
    "gpt2, save dots, no loop": (GPT2, ["training.save=dots", "training.unroll=null", *DEEP]),
    "stages": (PIPELINE, ["pipeline.virtual_stages=1"]),
    "stages, recompute": (PIPELINE, ["pipeline.recompute=true"]),
    "stages, recompute, gathered": (PIPELINE, ["pipeline.recompute=true", GATHERED]),
    "stages, gpipe": (PIPELINE, ["pipeline.schedule=gpipe", "pipeline.virtual_stages=1"]),
    "stages, 1f1b, gathered": (PIPELINE, ["pipeline.schedule=1f1b", "pipeline.virtual_stages=1", GATHERED]),
    "stages, uneven": (PIPELINE, ["model.layers=5", "pipeline.virtual_stages=1", STAGES[1]]),
    "stages, uneven, gathered": (PIPELINE, ["model.layers=5", "pipeline.virtual_stages=1", STAGES[1], GATHERED]),
    "stages, muon": (PIPELINE, ["optimizer=muon"]),
    "stages, loss in chunks": (PIPELINE, ["training.loss_chunk=16"]),
    "gpt2, stages, uneven": (GPT2, ["model.dropout=0.1", "model.layers=5", "pipeline.schedule=1f1b", *STAGES]),
    "gpt2, stages, not gathered": (GPT2, ["model.dropout=0.1", "model.layers=4", *STAGES[:1], NOT_GATHERED]),
}
"""A file in configs/ and its overrides, by name."""


def cases() -> dict[str, tuple[str, list[str], str]]:
    """A file in configs/, its overrides, and a mesh, by the name of the case."""
    found = {}
    for name in sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "base"):
        for mesh in MESHES:
            if mesh != "p=4 t=2" or name.startswith("local"):
                found[f"{name} on {mesh}"] = (name, STAGES if "p" in mesh and name != PIPELINE else [], mesh)
    for label, (name, overrides) in VARIED.items():
        found |= {f"{label} on {m}": (name, overrides, m) for m in MESHES if m != "p=4 t=2" or "stages" in label}
    return found


def programs(name: str, overrides: list[str], mesh: str) -> dict[str, str]:
    """Hash of each program of a run, or the first line of the error if it is refused."""
    p, r, d, t = MESHES[mesh]
    try:
        c = load(name, ["paths.model_name=programs", *overrides])
        with jax.set_mesh(make_mesh(r, d, t, jax.devices()[: p * r * d * t], p)):
            check_divides(c, jax.sharding.get_mesh().shape)
            return _programs(c, sampled=p == 1 and name.startswith("local"))
    except ValueError as error:
        return {"refused": str(error).splitlines()[0]}


def _programs(c: Config, sampled: bool) -> dict[str, str]:
    model = load_model(c.model)
    init, state = jax.jit(lambda: train.init_state(jax.random.key(0), c, model)), state_shapes(c, model)
    batch = batch_shapes(c.training.batch_size, c.training.seq_len, c.training.microbatches)
    found = {
        "init": init.trace(),
        "training": train.make_training_step(c, model).trace(state, batch, np.int32(0)),
        "evaluation": train.make_evaluation_step(c, model).trace(state.weights, batch),
    }
    if sampled:
        settings, context = Settings(max_tokens=8, top_k=5, top_p=0.9), min(32, c.training.seq_len)
        found |= _of_sampling(Sampler(train.Forward(model, c.training), settings, context), state.weights)
    return {part: hash_of(traced) for part, traced in found.items()}


def _of_sampling(sampler: Sampler, weights: Any) -> dict[str, jax.stages.Traced]:
    batch, length = sampler.batch_for(DEVICES), sampler.padded(9)
    ids, fresh = np.zeros((batch, length), np.uint32), np.ones(batch, bool)
    cache = jax.eval_shape(sampler.prefill, weights, ids, fresh, None)
    zeros, places = np.zeros(batch, np.int32), np.zeros((batch, length), np.int32)
    texts = Texts(number=zeros, length=zeros, token=np.zeros(batch, np.uint32), place=zeros, left=zeros)
    tokens = TokenBatch(targets=ids, is_seq_start=ids == 0, loss_mask=ids == 0)
    return {
        "prefill": sampler.prefill.trace(weights, ids, fresh, None),
        "prefill again": sampler.prefill.trace(weights, ids, fresh, cache),
        "decode": sampler.decode.trace(weights, cache, texts),
        "compare": sampler.compare.trace(weights, tokens, places, places),
    }


def main() -> None:
    """Writes the hashes, and compares them with those of `--against`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where to write the hashes")
    parser.add_argument("--against", type=Path, help="hashes to compare with")
    parser.add_argument("--only", default="", help="only cases with this text in their names")
    options = parser.parse_args()
    simulate_devices(DEVICES)
    before = json.loads(options.against.read_text()) if options.against else None
    if before and before["jax"] != jax.__version__:
        parser.error(f"{options.against} is of jax {before['jax']}, this is jax {jax.__version__}; use the same.")
    after, different = {"jax": jax.__version__}, 0
    for label, case in cases().items():
        if options.only not in label:
            continue
        after[label] = programs(*case)
        old = before.get(label, {}) if before else after[label]
        for part in sorted({*old, *after[label]}):
            if old.get(part) != after[label].get(part):
                different += 1
                print(f"{label}: {part}: {old.get(part)} before, {after[label].get(part)} now", flush=True)
    options.file.write_text(json.dumps(after, indent=1))
    found = [entry for label, entry in after.items() if label != "jax"]
    refused = sum("refused" in entry for entry in found)
    traced = sum(map(len, found)) - refused
    print(f"{traced} programs of {len(found)} cases, {refused} of them refused; {different} differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
