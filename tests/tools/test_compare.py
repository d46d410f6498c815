"""tools.ladder compare: an idea and a baseline, over widths and seeds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.run.launch import composed
from shardwright.tools.ladder.compare import best_rate, sizes_at

ROOT = Path(__file__).parents[2]


def test_sizes_grow_with_the_width():
    c = composed("track")
    grown = ["model.d_model=48", "model.d_ff=128", "model.d_head=16"]
    assert [*sizes_at(c, 48, ["d_ff", "d_head"])] == grown
    for name, why in (("n_kv", "is 3, which cannot grow"), ("d_fff", "is None, which cannot")):
        with pytest.raises(ValueError, match=f"model.{name} {why}"):
            [*sizes_at(c, 48, [name])]


def test_the_best_rate_is_that_of_the_lowest_finite_loss(tmp_path, capsys):
    losses = {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.5, 8e-3: float("nan")}

    def write(rate, loss):
        run = tmp_path / f"{rate}"
        run.mkdir()
        end = {"event": "end", "step": 1, "state": "finished"}
        lines = [{"step": 1, "loss": loss}, {"step": 1, "event": "validation", "loss": loss}, end]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "config.yaml").write_text(json.dumps({"optimizer": {"learning_rate": rate}}))

    write(8e-3, losses[8e-3])
    with pytest.raises(ValueError, match=r"no run in .* has a finite loss"):
        best_rate(tmp_path, [8e-3])
    for rate in (1e-3, 2e-3, 4e-3):
        write(rate, losses[rate])
    assert best_rate(tmp_path, [*losses]) == 2e-3
    assert "it is the last one" not in capsys.readouterr().out
    assert best_rate(tmp_path, [2e-3, 4e-3]) == 2e-3
    assert "it is the last one, so try more" in capsys.readouterr().out


TRAIN = """
import json, pathlib, sys

if __name__ == "__main__":
    print(*sys.argv[1:])
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    model = {name.partition(".")[2]: x for name, x in given.items() if name.startswith("model.")}
    for seed in map(int, given["training.seed"].split(",")):
        run = pathlib.Path("runs", given["paths.model_name"], str(seed))
        run.mkdir(parents=True)
        settings = {"model": model, "training": {"seed": seed}}
        (run / "config.yaml").write_text(json.dumps(settings))
        loss = 3.0 + seed - ("qk_norm" in model) * 0.25
        lines = [{"step": 1, "loss": loss}, {"step": 1, "event": "end", "state": "finished"}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
    sys.exit()
"""
"""The begin of a train.py whose runs only write what a report reads."""


@pytest.mark.long
def test_one_command_trains_both_and_compares_them(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + (ROOT / "train.py").read_text())
    words = ["--config-name=track", "model.layers=1", "training.steps=3"]
    own = ["compare.idea=[model.qk_norm=true]", "compare.widths=[48]", "compare.seeds=[0,1]"]
    own += ["compare.grows=[d_head,d_ff]", "paths.model_name=a"]
    command = [sys.executable, "-m", "shardwright.tools.ladder", "compare", *words, *own]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"a/idea-\* minus .*-0\.25", done.stdout, re.DOTALL)
    assert "2 pairs:" in done.stdout
    assert "They differ in model.qk_norm." in done.stdout
    assert (tmp_path / "runs/a/report.html").exists()
    grown = ["model.d_model=48", "model.d_head=16", "model.d_ff=128"]
    for arm, idea in {"baseline": [], "idea": ["model.qk_norm=true"]}.items():
        of_arm = ["training.seed=0,1", f"paths.model_name=a/{arm}-48"]
        assert " ".join(["--multirun", *words, *grown, *idea, *of_arm]) in done.stdout
