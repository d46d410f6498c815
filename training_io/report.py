"""What a run tells about itself on the terminal, when it starts and when it ends."""

from pathlib import Path
from typing import Any

import jax
from omegaconf import OmegaConf


def say_start(directory: Path, start: int, mesh: jax.sharding.Mesh, model: str, data: Any, loader: Any, steps: int):
    """Prints the run's place, devices, model and data; on process 0 alone.

    Args:
        directory: of the run.
        start: steps done before.
        mesh: all devices of the run.
        model: what to say of the model.
        data: the DataConfig.
        loader: of the training split.
        steps: of the whole run.
    """
    if jax.process_index():
        return
    name = data.filespec or " + ".join(data.mixture) or "stream"
    length = f"{loader.num_tokens:,}" if loader.num_tokens is not None else "unknown number of"
    print(f"run        {directory}" + (f", resumed after {start} steps" if start else ""))
    print(f"devices    {mesh.size} x {mesh.devices.flat[0].device_kind}: mesh {dict(mesh.shape)}")
    print(f"model      {model}")
    print(f"data       {name}: {length} tokens; {steps:,} steps of {loader.tokens_per_batch:,}")
    entropy = loader.unigram_entropy()
    if entropy is not None:
        print(f"unigram    {entropy:.3f} nats a token: a lower loss has learned more than how often each token comes")


def save_config(directory: Path, config: Any) -> None:
    """Writes the run's settings, a dataclass, into config.yaml; on process 0 alone."""
    if jax.process_index() == 0:
        OmegaConf.save(OmegaConf.structured(config), directory / "config.yaml")


def say_end(directory: Path, steps: int, loss: float, loader: Any, trace: Path | None, rendering: Any) -> None:
    """Prints the last loss in nats a token and the places of what the run left; on process 0 alone.

    `rendering`: of the HLO picture, as start_rendering gives it, or None. It is waited for.
    """
    if jax.process_index():
        return
    entropy = loader.unigram_entropy()
    known = f"; unigram entropy {entropy:.3f}" if entropy is not None else ""
    print(f"loss {loss:.3f} nats a token at the last step{known}")
    print(f"metrics    {directory / 'metrics.jsonl'}")
    print(f"checkpoint {directory / 'checkpoints' / f'{steps:010}'}")
    if trace:
        print(f"trace      {trace}  (open it at ui.perfetto.dev)")
    if rendering:
        print(rendering.result())
