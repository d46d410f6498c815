"""tools.ladder compare: an idea and a baseline, over widths and seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.run.launch import composed
from shardwright.tools.ladder.compare import CompareConfig, best_rate, compare, sizes_at

ROOT = Path(__file__).parents[2]


def test_sizes_grow_with_the_width():
    c = composed("track")
    grown = ["model.d_model=48", "model.d_ff=128", "model.d_head=16"]
    assert [*sizes_at(c, 48, ["d_ff", "d_head"])] == grown
    for name, why in (("n_kv", "is 3, which cannot grow"), ("d_fff", "is None, which cannot")):
        with pytest.raises(ValueError, match=f"model.{name} {why}"):
            [*sizes_at(c, 48, [name])]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"idea": []}, "as the baseline"),
        ({"idea": ["model.qk_norm=true"], "seeds": [1]}, "give two seeds or more"),
        ({"idea": ["model.qk_norm=true"], "widths": [100]}, "is 3, which cannot grow"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_run(settings, message):
    with pytest.raises(ValueError, match=message):
        compare(composed("track"), CompareConfig(**settings))


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


@pytest.mark.long
def test_one_command_trains_both_and_compares_them(tmp_path):
    words = ["--config-name=track", "compare.widths=[48]", "compare.seeds=[0,1]"]
    words += ["compare.grows=[d_head,d_ff]", "model.layers=1", "training.batch_size=2"]
    words += ["training.steps=3", f"paths.root_working_dir={tmp_path}", "paths.model_name=a"]
    env = {**os.environ, "XLA_FLAGS": ""}

    def run(*settings):
        command = [sys.executable, "-m", "tools.ladder", "compare", *words, *settings]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)

    wrong = run("compare.idea=[model.qk_nrm=true]")
    assert wrong.returncode == 1
    assert "no setting model.qk_nrm. Did you mean model.qk_norm?" in wrong.stderr
    assert not (tmp_path / "a").exists()
    done = run("compare.idea=[model.qk_norm=true]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a/idea-* minus" in done.stdout
    assert "2 pairs:" in done.stdout
    assert "They differ in model.qk_norm." in done.stdout
    assert (tmp_path / "a/report.html").exists()
    for arm in ("baseline", "idea"):
        assert len([*tmp_path.glob(f"a/{arm}-48/*/metrics.jsonl")]) == 2
