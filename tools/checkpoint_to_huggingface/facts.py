"""What is known of an exported model, from its checkpoint and the files of its run: rows of tables.

A row says what was recorded or measured, or that it is not known. Its values may be a stranger's.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.run.resuming import with_defaults
from shardwright.settings.differences import flat
from tools.report.reading import Run, number, read_run, smoothed

SMOOTH = 50
"""Steps over which losses are averaged, or a tenth of all if that is fewer."""
_OF_PLACES = ("paths.", "trackers.", "distributed.", "hardware.compilation_cache", "hardware.environment")
"""Beginnings of the settings that are left out: they say where a run was, and not what it is."""
_NO_RUN = "not known: the run's directory was not at hand for the export"

Rows = list[tuple[str, str]]
"""Names and values."""


@dataclass
class Exported:
    """A model that is exported."""

    name: str
    """Title of the card."""
    repository: str | None
    """<owner>/<name> on the hub; None: it is not pushed."""
    step: int
    """Number of steps of training that made the weights."""
    weights: str
    """weights or ema."""
    dtype: str
    """Dtype of the weights in the files."""
    parameters: int
    """Number of parameters."""
    content: dict[str, Any]
    """Content of config.json."""
    metadata: dict[str, Any]
    """Metadata of the checkpoint, with its configuration."""
    has_tokenizer: bool
    """Whether the export has a tokenizer."""
    compared: str
    """What the comparison of logits found."""
    license: str | None = None
    """Its name on the hub; None: not given."""
    run: Run | None = None
    """The files of the run, up to the step; None: they are not at hand."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the checkpoint by their dotted names."""
        return flat(self.metadata["config"])

    @property
    def saved(self) -> dict[str, Any]:
        """The provenance in the checkpoint; empty in older ones."""
        return self.metadata.get("provenance") or {}


# ---- reading ------------------------------------------------------------------------------------------------------


def read_run_until(place: str, step: int) -> Run | None:
    """The run of a checkpoint, with its first `step` steps alone; None if its directory is not at hand.

    `place` is the directory or URL of a run, or of one of its checkpoints.
    """
    path = Path(place)
    above = [path, *([path.parent.parent] if path.parent.name == "checkpoints" else [])]
    directory = next((d for d in above if (d / "metrics.jsonl").is_file() or (d / "config.yaml").is_file()), None)
    if directory is None:
        return None
    run = read_run(directory, SMOOTH, before=step)
    return dataclasses.replace(run, own={}, starts=[(at, about) for at, about in run.starts if at < step])


def public(value: Any) -> Any:
    """The value without the directories and servers that it names: of a path or an address, the last part."""
    if isinstance(value, Mapping):
        return {name: public(part) for name, part in value.items()}
    if isinstance(value, list):
        return [public(part) for part in value]
    if isinstance(value, str) and (value.startswith(("/", "~", "../")) or "://" in value):
        return f"…/{re.split(r'[?#]', value)[0].rstrip('/').rpartition('/')[2]}"
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- the model and its settings -----------------------------------------------------------------------------------


def model(x: Exported) -> Rows:
    """What the model is."""
    c = x.metadata["config"]["model"]
    sizes = ("layers", "d_model", "n_kv", "n_q_per_kv", "heads", "d_head", "d_ff", "vocab")
    kind = "moving average of the weights" if x.weights == "ema" else "weights as trained"
    return [
        ("Architecture", f"{(x.content.get('architectures') or ['?'])[0]}, model.module {c['module']}"),
        ("Parameters", f"{x.parameters:,}"),
        ("Sizes", ", ".join(f"{name} {_text(c[name])}" for name in sizes if name in c)),
        ("Sequence length in training", _text(x.settings["training.seq_len"])),
        ("Files", f"{x.dtype}, {kind}, after {x.step:,} steps"),
    ]


def settings(x: Exported) -> tuple[list[tuple[str, str, str]], Rows]:
    """The settings that differ from the defaults, with these, and all settings. Without those of places."""
    module = x.metadata["config"]["model"]["module"]
    defaults = flat(with_defaults({"model": {"module": module}}, module))
    all_of = {name: value for name, value in x.settings.items() if not name.startswith(_OF_PLACES)}
    chosen = [
        (name, _text(public(value)), _text(defaults[name]) if name in defaults else "")
        for name, value in all_of.items()
        if name not in defaults or _text(defaults[name]) != _text(value)
    ]
    return chosen, [(name, _text(public(value))) for name, value in all_of.items()]


# ---- data and training --------------------------------------------------------------------------------------------


def data(x: Exported) -> Rows:
    """What the model was trained on."""
    given, rows = x.metadata["config"]["data"], []
    stream = given.get("stream") if isinstance(given.get("stream"), Mapping) else {}
    mixture = given.get("mixture") if isinstance(given.get("mixture"), Mapping) else {}
    names = [given.get("filespec"), *(s.get("filespec") for s in mixture.values() if isinstance(s, Mapping))]
    names += [stream.get("dataset"), stream.get("files")]
    rows.append(("Data", ", ".join(_text(public(name)) for name in names if name) or "not known"))
    per_step = [x.settings.get(f"training.{name}") for name in ("batch_size", "seq_len")]
    if x.run is not None and len(x.run.step):
        rows.append(("Tokens seen", f"{x.run.tokens[-1]:,.0f}, of metrics.jsonl"))
    elif all(isinstance(size, int) for size in per_step):
        rows.append(("Tokens seen", f"{x.step * math.prod(per_step):,}: steps times the size of a batch"))
    vocabulary = f"of the data, with a vocabulary of {_text(x.settings['model.vocab'])}"
    rows.append(("Tokenizer", f"{vocabulary}: in tokenizer.json" if x.has_tokenizer else "not part of this export"))
    return rows


def dataset_on_hub(x: Exported) -> str | None:
    """Name of the dataset on the hub that the run streamed; None for other data."""
    stream = x.metadata["config"]["data"].get("stream")
    name = stream.get("dataset") if isinstance(stream, Mapping) else None
    is_name = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", name, re.ASCII)
    return name if is_name and not Path(name).exists() else None


def training(x: Exported) -> Rows:
    """How the model was trained: steps, devices, versions, source."""
    rows = [("Steps", f"{x.step:,}" + (f" of {x.run.total_steps:,}" if x.run and x.run.total_steps else ""))]
    if x.run is None or not x.run.about:
        why = _NO_RUN if x.run is None else "not known: the run has no provenance.json that can be read"
        rows.append(("Mesh, devices, versions, commit", why))
    for at, about in x.run.starts if x.run else ():
        of_run = about.get("run") if isinstance(about.get("run"), dict) else {}
        packages = about.get("packages") if isinstance(about.get("packages"), dict) else {}
        versions = [("Python", about.get("python")), *((name, packages.get(name)) for name in ("jax", "jaxlib"))]
        changed = x.run.directory / "source" / f"{at:010}" / "changes.patch"
        commit = f"commit {_text(about['commit'])[:12]}" if about.get("commit") else "no commit is known"
        facts = [
            f"mesh {_mesh(of_run['mesh'])}" if "mesh" in of_run else "",
            _text(of_run.get("devices", "")),
            *(f"{name} {_text(version)}" for name, version in versions if version),
            commit + " with changes" * changed.exists() if about else "provenance.json cannot be read",
            _text(about.get("started", "")),
        ]
        rows.append((f"Started after {at:,} steps" if at else "Started", "; ".join(filter(None, facts))))
    if isinstance(programs := x.saved.get("programs"), dict) and "training" in programs:
        rows.append(("Hash of the training step", programs["training"]))
    return rows


def loss(x: Exported) -> Rows:
    """Losses at the end of the steps that made the weights."""
    if x.run is None:
        return [("Losses", _NO_RUN)]
    if not len(x.run.step):
        return [("Losses", "not known: the run has no metrics.jsonl with its steps")]
    entropy, averaged = number(x.run.fact("unigram_entropy")), min(SMOOTH, max(1, len(x.run.step) // 10))
    last = int(x.run.step[-1]) + 1
    found = smoothed(x.run.loss, SMOOTH)[-1]
    mean = f", mean of {averaged} steps" * (averaged > 1)
    rows = [(f"Training, at step {last:,}", f"{found:.3f} nats a token{mean}")]
    if last < x.step:
        rows.append(("Not known", f"losses of steps {last + 1:,} to {x.step:,}: they are not in metrics.jsonl"))
    if events := x.run.of_event("validation"):
        event = events[-1]
        bits = f", {number(event['bits_per_byte']):.3f} bits a byte" if "bits_per_byte" in event else ""
        tokens = f", on {number(event['targets']):,.0f} tokens" if "targets" in event else ""
        of = " of the moving average" if event.get("weights") == "ema" else ""
        value = f"{number(event.get('loss')):.3f} nats a token{bits}{tokens}"
        rows.append((f"Validation{of}, at step {event['step'] + 1:,}", value))
    else:
        rows.append(("Validation", "not run"))
    if math.isfinite(entropy):
        rows.append(("Unigram entropy of the data", f"{entropy:.3f} nats a token"))
    return rows


# ---- what was checked ---------------------------------------------------------------------------------------------


def checks(x: Exported) -> Rows:
    """What the run recorded of the check before its first step, and what the export compared."""
    title = "The step on its mesh, before the first step"
    if x.run is None or not x.run.starts:
        return [(title, _NO_RUN), ("Logits of these files, by the export", x.compared)]
    rows = [(f"{title}{f' after {at:,}' if at else ''}", _proof(about)) for at, about in x.run.starts]
    return [*rows, ("Logits of these files, by the export", x.compared)]


def _proof(about: dict[str, Any]) -> str:
    proof = about.get("proof")
    if not (isinstance(proof, dict) and isinstance(proof.get("mesh"), dict) and proof.get("programs")):
        return "not recorded by the run"
    return (
        f"the run recorded a proof: on mesh {_mesh(proof['mesh'])}, {_text(proof['programs'])} compute what they "
        "compute on one device, under the assumptions of docs/soundness.md"
    )


def _mesh(sizes: Any) -> str:
    """`r=1 d=4 t=2`."""
    return " ".join(f"{axis}={_text(n)}" for axis, n in sizes.items()) if isinstance(sizes, dict) else _text(sizes)
