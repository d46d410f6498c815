"""bench.hour: the steps that a time holds, the recipe that nanoGPT gets, and the score of each token once."""

import json
import math

import pytest
import yaml

torch = pytest.importorskip("torch", reason="bench.hour runs nanoGPT, with torch")

from bench import hour  # noqa: E402 - after torch is known to be there

RECIPE = yaml.safe_load((hour.ROOT / "configs/local_hour.yaml").read_text())
CODE = "import json, sys, pathlib\n(pathlib.Path(__file__).parent / 'given.json').write_text(json.dumps(sys.argv[1:]))"


@pytest.fixture
def nanogpt(tmp_path, monkeypatch):
    """NanoGPT whose train.py writes its arguments and makes its directory."""
    (tmp_path / "train.py").write_text(CODE + "\npathlib.Path(sys.argv[-2].partition('=')[2]).mkdir(exist_ok=True)")
    monkeypatch.setattr(hour, "documents", lambda tokenizer, split: [([5, 6, 1], 9)])
    return hour.NanoGPT(tmp_path, tmp_path, RECIPE, tokenizer=None)


def test_steps_fill_the_time():
    start, step = 30.0, 0.5
    steps = hour.steps_in(3600, [start + step * count for count in hour.SHORT])
    assert 0.96 * 3600 < start + step * steps < 3600


@pytest.mark.parametrize("short", [[30.0, 90.0], [60.0, 60.0], [60.0, 50.0]], ids=["slow", "none", "negative"])
def test_too_few_steps_are_refused_after_the_short_runs(short, monkeypatch, capsys):
    begin, runs = iter([0.0, short[0], 100.0, 100.0 + short[1]]), []
    monkeypatch.setattr(hour.time, "monotonic", lambda: next(begin))
    with pytest.raises(SystemExit, match=r"steps fit in 1 minutes, and the warmup alone has 100: give more --minutes"):
        hour.trained(1, 100, lambda steps, is_short: runs.append((steps, is_short)))
    assert runs == [(steps, True) for steps in hour.SHORT]


def test_nanogpt_gets_the_recipe(nanogpt):
    nanogpt.train(700, is_short=False)
    given = dict(x[2:].split("=") for x in json.loads((nanogpt.checkout / "given.json").read_text()))
    model, training, optimizer = (RECIPE[name] for name in ("model", "training", "optimizer"))
    assert [int(given[name]) for name in ("n_layer", "n_embd", "block_size", "batch_size")] == [
        *(model[name] for name in ("layers", "d_model")),
        *(training[name] for name in ("seq_len", "batch_size")),
    ]
    assert [float(given[name]) for name in ("learning_rate", "weight_decay", "beta2", "warmup_iters")] == [
        float(optimizer[name]) for name in ("learning_rate", "weight_decay", "adam_b2", "warmup_steps")
    ]
    assert given["max_iters"] == given["lr_decay_iters"] == "700"
    assert nanogpt.run.exists()


def test_each_token_is_scored_once_and_sees_no_other_window(nanogpt, monkeypatch):
    seen = []

    def model(inputs, targets):
        seen.append((inputs[0].tolist(), targets[0].tolist()))
        return torch.zeros(1, len(targets[0]), 8), None

    monkeypatch.setattr(nanogpt, "model", lambda: model)
    nats = nanogpt.nats([([3, 4, 5, 6, 1], 0), ([7, 1], 0)], length=3)
    assert nats == pytest.approx(7 * math.log(8))
    assert seen == [([1, 3, 4], [3, 4, 5]), ([1, 6], [6, 1]), ([1, 7], [7, 1])]


def test_a_directory_without_nanogpt_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hour", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        hour.main()
    assert "is no checkout of nanoGPT" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
