"""Wrong edits of the model files, each of which computes another thing on a mesh: the refusal names the edited line."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
from own_model import imported
from proofs import found_soon

import train
from models import family, gpt2, moe
from shardlib.parsing import ShardError
from shardwright.modeling.model import load_model
from shardwright.run.step import trace_step
from tools.verify.meshes import abstract_mesh_of

ROOT, TABLE = Path(train.__file__).parent, Path(__file__).parents[1] / "data" / "edited_lines.txt"
SIZES = {"vocab": 64, "d_model": 32, "layers": 2, "n_kv": 4, "n_q_per_kv": 2, "d_head": 16, "d_ff": 32}
CAPS = {"attention_softcap": 5.0, "logit_softcap": 5.0}
EXPERTS = {"experts": 8, "experts_per_token": 2, "capacity_factor": 2.0, "pools": 4, "shared_experts": 1}
LOSSES = {"balance_loss": 0.1, "router_z_loss": 0.1, "correction_bias": True}
CONFIGS = {
    "train": lambda: train.ModelConfig(**SIZES, qk_norm=True, logit_softcap=5.0),
    "gpt2": lambda: gpt2.ModelConfig(vocab=64, positions=16, d_model=32, layers=2, heads=4, dropout=0.1),
    "family": lambda: family.ModelConfig(**SIZES, **CAPS, window=4, embedding_scaled=True, qk_norm_all=True),
    "moe": lambda: moe.ModelConfig(**SIZES, **EXPERTS, **LOSSES),
}
QUICK = ("mean of local heads",)
LONG = ("no slots on a mesh", "RoPE by the devices of t")


class Edit(NamedTuple):
    module: str
    name: str
    old: str
    new: str
    named: str
    """What the line has that is named in place of the edited one."""

    def __str__(self) -> str:
        return f"{self.module}: {self.name}"


def edits() -> list[Edit]:
    found = []
    for block in TABLE.read_text().split("\n\n")[1:]:
        title, *lines = block.splitlines()
        part = lambda sign, lines=lines: "\n".join(line[1:] for line in lines if line[0] == sign)
        found.append(Edit(*title.split(": "), part("-"), part("+"), part(">")))
    return found


def marks(edit: Edit) -> list:
    return [pytest.mark.long(every_case=True) if edit.name in LONG else pytest.mark.long] * (edit.name not in QUICK)


EDITS = [pytest.param(edit, marks=marks(edit)) for edit in edits()]


@pytest.mark.parametrize("edit", EDITS, ids=str)
def test_a_wrong_edit_is_refused_at_its_line(edit, tmp_path):
    source = (ROOT / ("" if edit.module == "train" else "models") / f"{edit.module}.py").read_text()
    assert edit.old in source, f"{edit.module}.py no longer has {edit.old!r}: change {TABLE.name}"
    changed = source.replace(edit.old, edit.new, 1)
    expected = edit.named or edit.new
    first = changed[: changed.index(expected)].count("\n") + 1

    def is_named(text: str) -> bool:
        lists = re.findall(rf"edited_{edit.module}\.py:(\d+(?:, \d+)*)", text)
        named = {int(number) for lines in lists for number in lines.split(", ")}
        return bool(named & {*range(first, first + expected.count("\n") + 1)})

    text = refusal(edit.module, changed, tmp_path, is_named)
    assert is_named(text), text
    assert "per_device" not in text


def refusal(module: str, changed: str, directory: Path, is_named: Callable[[str], bool]) -> str:
    """What is said of a changed module before the first step."""
    c = CONFIGS[module]()
    c.module = f"edited_{module}"
    mesh = dict.fromkeys("prdect", 1) | {"d": 2, "t": 2} | ({"e": 2} if module == "moe" else {})
    with imported(c.module, changed, directory) as edited, abstract_mesh_of(mesh):
        try:
            trainer = edited if module == "train" else train
            return found_soon(trace_step(tiny.config(c), load_model(c), trainer=trainer), is_named)
        except ShardError as error:
            return str(error)
