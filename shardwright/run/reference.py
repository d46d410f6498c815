"""Loads the frozen model of training.reference, a teacher or reference policy, whose logits the training step uses."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

from shardlib.axes import PIPELINE_AXIS
from shardlib.mesh import mesh_axes
from shardlib.shardtypes import scope
from shardwright.modeling.forward import Forward
from shardwright.modeling.kernel_checks import check_paths
from shardwright.modeling.model import LanguageModel, inputs_of, load_model
from shardwright.modeling.weights import shapes_of, sharded
from shardwright.run.checkpoint import find_checkpoint
from shardwright.run.config import Config, check_divides
from shardwright.run.printing import log
from shardwright.run.resuming import config_of, saved_config
from shardwright.run.spec import StepSpec


@functools.cache  # so that a process keeps using one checkpoint while the reference's run saves more
def _manifest(path: str) -> tuple[int, dict]:
    """Reads the step and manifest of the checkpoint at a path, as for find_checkpoint."""
    checkpoints, step = find_checkpoint(path)
    with checkpoints:
        return step, checkpoints.manifest(step)


def model_of(c: Config) -> LanguageModel | None:
    """Loads the model of training.reference, as its own run configured it; None without a reference.

    Raises ValueError if there is no such checkpoint, or if the training step cannot run the model on the current mesh.
    """
    if (path := c.training.reference) is None:
        return None
    try:
        if mesh_axes().get(PIPELINE_AXIS, 1) > 1:
            raise ValueError(f"it cannot run with pipeline stages. Set mesh.{PIPELINE_AXIS}=1.")
        metadata = _manifest(path)[1]["metadata"]
        saved = saved_config(metadata)
        metadata["config"].pop("pipeline", None)  # reference_record has never hashed it
        # Not used in this run, and they may name untrusted code and addresses.
        saved |= {"pipeline": {}, "data": {}, "trackers": {}, "training": saved["training"] | {"changes": []}}
        saved["optimizer"] = saved.get("optimizer", {}) | {"algorithm": "adamw", "loss": "cross_entropy", "groups": []}
        sizes = config_of(saved, trust=saved["model"].get("module") == c.model.module).model
        model = load_model(sizes)
        inputs = inputs_of(load_model(c.model))
        if sizes.vocab != c.model.vocab:
            raise ValueError(f"it has {sizes.vocab} token ids. Choose one with model.vocab = {c.model.vocab}.")
        if inputs_of(model) not in ((), inputs):
            raise ValueError(f"it reads the inputs {', '.join(inputs_of(model))}, which this run does not have.")
        sizes.check(c.training.seq_len)
        check_divides(dataclasses.replace(c, model=sizes), mesh_axes(), of_batch=False)
    except ValueError as error:
        raise ValueError(f"training.reference is {path}: {error}") from error
    return model


def check_paths_with_reference(step: Any, options: dict[str, Any]) -> None:
    """Runs check_paths for a Step, and for the same step with the model of training.reference."""
    check_paths(step, options)
    if model := model_of(step.config):
        check_paths(dataclasses.replace(step, model=model, _known={}), options)


def weights_of(c: Config, spec: StepSpec) -> tuple:
    """Returns the shapes of the weights of training.reference, as a tuple of one pytree; () without a reference.

    A training step takes the weights after its step number. Raises ValueError if the step of `spec` takes none.
    """
    if (model := model_of(c)) is None:
        return ()
    if not spec.takes_reference:
        raise ValueError(
            f"training.reference is {c.training.reference}, and {spec.module} trains without a reference: apply one of "
            "docs/recipes/distillation.patch and dpo.patch, or leave it out."
        )
    return (shapes_of(model.table),)


def forward_of(c: Config, einsum: Callable[..., Any]) -> Forward:
    """Returns the forward pass of the model of training.reference; `einsum` is softmax_attention of train.py.

    Raises ValueError without a reference, or as model_of.
    """
    if (model := model_of(c)) is None:
        raise ValueError("this train.py compares with another model: set training.reference to a checkpoint of it.")
    return Forward(model, c.training, einsum)


def logits_of(forward: Forward, w: object) -> Callable[[Any], Any]:
    """Makes a per-device function that computes the reference's logits of a TokenBatch, with weights `w` at rest."""
    copies = scope(forward.gatherable)(w)  # in separate scopes, because its dims have other sizes
    return scope(lambda batch: forward.logits(copies, forward.tokens(batch)))


def read_reference(c: Config, spec: StepSpec) -> tuple:
    """Reads the weights of training.reference, sharded as at rest on the current mesh.

    Returns a tuple of one pytree; () without a reference. Raises as `weights_of`.
    """
    path = str(c.training.reference)
    weights = []
    for shapes in weights_of(c, spec):
        checkpoints, step = find_checkpoint(path, _manifest(path)[0])
        log(f"reference  {path}, after {step} steps; it is not trained")
        with checkpoints:
            weights.append(checkpoints.restore(step, {"weights": sharded(type(shapes), shapes)})["weights"])
    return tuple(weights)


def reference_record(c: Config) -> dict[str, Any] | None:
    """Returns path, step and hash of the manifest of training.reference, for checkpoints; None without a reference."""
    if model_of(c) is None:
        return None
    step, manifest = _manifest(c.training.reference)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:20]
    return {"path": c.training.reference, "step": step, "manifest": digest}


def check_reference(saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Raises ValueError if the reference_record in a checkpoint, `saved`, and the current one, `now`, differ."""
    if (saved or {}).get("manifest") != (now or {}).get("manifest"):

        def shown(record):
            return f"{record['path']} after {record['step']} steps" if record else "none"

        raise ValueError(
            f"training.reference is {shown(now)}, and the run was made with {shown(saved)}. Give that one (by the path "
            "of the checkpoint, <run>/checkpoints/<step>, if there are later ones), or start another run with a new "
            "paths.model_name."
        )
