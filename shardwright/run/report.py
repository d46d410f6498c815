"""Lines that a run prints when it starts and when it ends, and what it keeps for its page."""

import time
from pathlib import Path
from typing import Any

import jax
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from shardwright.run.compiling import NO_PICTURE
from shardwright.run.config import Config
from shardwright.run.flops import Speed
from shardwright.run.optional import optional
from shardwright.run.resuming import with_defaults
from shardwright.settings.differences import flat
from shardwright.settings.words import say


def print_start(
    directory: Path, start: int, mesh: jax.sharding.Mesh, model: str, data: Any, loader: Any, steps: int
) -> None:
    """Prints the directory, devices, model and data of a run, on process 0 alone.

    Args:
        directory: of the run.
        start: number of steps done before.
        mesh: mesh of all devices of the run.
        model: line about the model.
        data: the DataConfig.
        loader: loader of the training split.
        steps: number of steps of the whole run.
    """
    name = data.filespec or " + ".join(data.mixture) or "stream"
    length = f"{loader.num_tokens:,}" if loader.num_tokens is not None else "unknown number of"
    tell(f"run        {directory}" + (f", resumed after {start} steps" if start else ""))
    tell(f"devices    {mesh.size} x {mesh.devices.flat[0].device_kind}: mesh {dict(mesh.shape)}")
    tell(f"model      {model}")
    tell(f"data       {name}: {length} tokens; {steps:,} steps of {loader.tokens_per_batch:,}")
    for source, share in loader.unseen.items():
        if share:
            tell(
                f"unpacked   {share:.1%} of the tokens of {source} are never seen: they are beyond the first "
                f"{loader.seq_len} of their document; data.sequence_packing=true reads all"
            )
    entropy = loader.unigram_entropy()
    if entropy is not None:
        tell(f"unigram    {entropy:.3f} nats a token: a lower loss has learned more than how often each token comes")


def tell(text: str) -> None:
    """Prints a text, on process 0 alone."""
    if jax.process_index() == 0:
        say(text)


def save_config(directory: Path, config: Any) -> None:
    """Writes the settings of a run, a dataclass, into config.yaml, on process 0 alone."""
    if jax.process_index() == 0:
        with optional(str(directory / "config.yaml")):
            OmegaConf.save(OmegaConf.structured(config), directory / "config.yaml")


def facts_of(c: Config, total: int, loader: Any, parameters: int, speed: Speed) -> dict[str, Any]:
    """Facts of this start that its page shows, for provenance.json. `total` is the number of steps of the whole run."""
    mesh, hydra = jax.sharding.get_mesh(), HydraConfig.get() if HydraConfig.initialized() else None
    module = c.model.module
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "recipe": hydra and hydra.job.config_name,
        "overrides": list(hydra.overrides.task) if hydra else None,
        "defaults": flat(with_defaults({"model": {"module": module}}, module)),
        "run": {
            "total_steps": total,
            "tokens_per_step": loader.tokens_per_batch,
            "unigram_entropy": loader.unigram_entropy(),
            "parameters": parameters,
            "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
            "mesh": dict(mesh.shape),
            "flops_per_token": f"{speed.flops.causal / 1e6:,.2f} MFLOP = {speed.flops.causal_formula}",
            "flops_per_token_full_attention": f"{speed.flops.full / 1e6:,.2f} MFLOP = {speed.flops.full_formula}",
            "peak_flops": speed.peak.total,
            "peak_source": speed.peak.source,
        },
    }


def print_end(directory: Path, checkpoint: str, loss: float, loader: Any, drawn: str | None, page: Path | None) -> None:
    """Prints the last loss in nats a token and what to open, on process 0 alone.

    `drawn` is what draw_step returns, and `page` the path of the page; each is None if there is none.
    """
    entropy = loader.unigram_entropy()
    known = f" (unigram {entropy:.3f})" if entropy is not None else ""
    tell(f"loss       {loss:.3f} nats a token at the last step{known}")
    tell(f"checkpoint {checkpoint}")
    print_page(directory, drawn, page)


def print_page(directory: Path, drawn: str | None, page: Path | None) -> None:
    """Prints where the page of the run is. Without one: where the metrics are, and what draw_step returned."""
    if drawn and (page is None or drawn.startswith(NO_PICTURE)):
        tell(drawn)
    tell(f"report     {page}  (open it in a browser)" if page else f"metrics    {directory / 'metrics.jsonl'}")
