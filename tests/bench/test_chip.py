"""bench.chip: the parts that it measures and what fails in them; attention and rates of a device."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from bench import chip
from bench.chip import PARTS, Part, command_of
from shardwright.cluster.chips import chip_of

ROOT = Path(__file__).parents[2]
NAMES = [part.name for part in PARTS]
PRINTED = {  # what each program prints, and the rows that are read from it
    chip.RUN: (
        "run        runs/y\n"
        "plan       69.6 ms a step (52.2 ms to 87.0 ms), MFU 27%, 5.33 GiB of 71.2 GiB on NVIDIA "
        "H100 SXM 80 GB\nstep 1/30  loss 6.211  grad_norm 2.257  learning_rate 0\n"
        "step 1  memory  peak_memory 5.12 GiB  source device\n"
        "step 10/30  ETA 0:00:01  loss 4.486  speed 560,310 tokens/s  MFU 32.1%  grad_norm 1.7  "
        "learning_rate 0.001\nstep 30/30  ETA 0:00:00  loss 3.151  speed 569,131 tokens/s  MFU "
        "32.6%  grad_norm 0.9  learning_rate 0.0009\nstep 30  validation  loss 3.179  targets "
        "4,096\n",
        [
            "69.6 ms a step (52.2 ms to 87.0 ms), MFU 27%, 5.33 GiB of 71.2 GiB on NVIDIA H100 SXM "
            "80 GB",
            *("loss 6.211", "5.12 GiB", "loss 3.151, 569,131 tokens/s  MFU 32.6%"),
        ],
    ),
    chip.ROW: (
        "devices: 1 x NVIDIA H100 80GB HBM3\nhardware=gpu hardware.chip=h100\n",
        ["1 x NVIDIA H100 80GB HBM3"],
    ),
    chip.SLOWEST: (
        "step 1/30  loss 6.211  grad_norm 2.257  learning_rate 0\n"
        "slowest    source lines, by their share of the time that devices work\n"
        "           waits: for data of other devices; 0.0% of all that time\n"
        "  time  waits  line\n 11.8%         shardwright/modeling/forward.py:115  return "
        "run_layers(layer, w,…\n  9.6%   2.0%  ~train.py:186                        up = "
        "save_for_backward(shar…\n  4.3%         without a line\n",
        ["loss 6.211", "11.8% of the time", "9.6% of the time", "4.3% of the time"],
    ),
    chip.TRAINERS: (
        "270m: 300 parameters, 32 sequences of 1024 tokens, bf16, gpu\n"
        "              tokens/s    median  floor  peak MiB compile s  ratio\n"
        "floor          338,129   338,129               312       0.9\n"
        "plain-jax      262,634   262,634  34.2%     27,110      13.8   1.01\n"
        "torch         failed: killed after 70 s: no message\n",
        [
            "338,129 tokens/s, 312 MiB, compiled in 0.9 s",
            "262,634 tokens/s, 27,110 MiB, compiled in 13.8 s",
            "failed: killed after 70 s: no message",
        ],
    ),
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stands in for the programs of all parts but those that the test names: each prints what it
    would print.
    """

    place = tmp_path / "programs"
    place.mkdir()
    (place / "printed.py").write_text(
        "import sys, pathlib\nprint(sys.argv[1])\nprint('W1: odd: a warning', file=sys.stderr)\n"
        "(pathlib.Path(sys.argv[2]) / 'checkpoints').mkdir(parents=True)\n"
    )
    (place / "planted.py").write_text(
        "print('matmul: 700 TFLOP/s', flush=True)\nraise RuntimeError('planted |')\n"
    )
    (place / "hanging.py").write_text(
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(99)'])\nprint('begins', flush=True)\nsubprocess.run(['sleep', '99'])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{place}:{ROOT}")

    def printed(part, out):
        return ["printed", PRINTED[part.figures][0], str(out / part.name)]

    monkeypatch.setattr(chip, "command_of", printed)
    return tmp_path / "out"


def table(out: Path) -> list[list[str]]:
    return [
        line.strip("| ").split(" | ") for line in (out / "chip.md").read_text().splitlines()[2:]
    ]


def test_each_part_is_measured_and_its_figures_are_read(programs, capsys):
    chip.main(["minutes=1", f"out={programs}"])
    expected = [(part.name, figures) for part in PARTS for figures in PRINTED[part.figures][1]]
    assert [(row[0], row[2].strip()) for row in table(programs)] == [
        (name, x.strip()) for name, x in expected
    ]
    printed = capsys.readouterr().out
    assert (programs / "chip.md").read_text() in printed
    assert "Call again" not in printed
    assert not (programs / "demo/checkpoints").exists(), "gigabytes"


def planting(monkeypatch, name: str, module: str) -> None:
    """Makes the part of this name run a module of `programs` instead."""
    of = chip.command_of
    monkeypatch.setattr(
        chip, "command_of", lambda part, out: [module] if part.name == name else of(part, out)
    )


def test_a_part_that_fails_is_noted_and_the_rest_goes_on(programs, monkeypatch, capsys):
    planted = "others"
    at = NAMES.index(planted)
    monkeypatch.setattr(chip, "PARTS", (*PARTS[at : at + 1], PARTS[at - 1]))
    with monkeypatch.context() as planted_here:
        planting(planted_here, planted, "planted")
        chip.main(["minutes=1", f"out={programs}"])
    (row,) = [row for row in table(programs) if row[1] == "failed"]
    assert row == [planted, "failed", "exit status 1: RuntimeError: planted /"]
    assert {row[0] for row in table(programs)} == {planted, NAMES[at - 1]}
    assert f"Call again for {planted}." in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in programs.glob("*.json")}
    chip.main(["minutes=1", f"out={programs}"])
    assert [path.stem for path, time in before.items() if path.stat().st_mtime_ns != time] == [
        planted
    ]
    assert not [row for row in table(programs) if row[1] == "failed"]


@pytest.mark.long
def test_a_part_that_hangs_ends_with_what_it_started(programs, monkeypatch):
    monkeypatch.setattr(
        chip, "PARTS", (Part("hangs", 1, ""), Part("next", 60, "", figures=chip.ROW))
    )
    planting(monkeypatch, "hangs", "hanging")
    begin = time.monotonic()
    chip.main(["minutes=1", f"out={programs}"])
    assert time.monotonic() - begin < 30
    assert table(programs)[0] == ["hangs", "failed", "its limit of 1 s ended it"]
    assert table(programs)[1][0] == "next"
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "time.sleep(99)" not in running


@pytest.mark.parametrize(
    "printed", ["hardware=gpu hardware.chip=h100", "hardware=gpu", "hardware=cpu hardware.chip=cpu"]
)
def test_the_commands_of_parts(tmp_path, printed):
    """With the settings that the part devices printed; small on a CPU alone."""
    (tmp_path / "devices.out").write_text(f"devices: 1 x it\n{printed}\n")
    for part in PARTS:
        command = command_of(part, tmp_path)
        assert (part.small.split()[-1:] == command[-1:]) == (bool(part.small) and "cpu" in printed)
        assert not any("{" in word for word in command)
        assert command[0] != "train" or {*printed.split()} < {*command}
        module = ROOT.joinpath(*command[0].split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    assert any(
        word.startswith(f"{tmp_path}/") for word in command_of(PARTS[NAMES.index("chip")], tmp_path)
    )


# ---- what the parts run --------------------------------------------------------------------------


@pytest.mark.long
def test_each_implementation_of_attention_agrees_with_f32(capsys):
    sizes = "--lengths 128 --tokens 256 --heads 2 --width 16"
    chip.main(["attention", *sizes.split()])
    line = r"^(.+): [\d.]+ ms, .* TFLOP/s, .* GiB, error (.+)$"
    found = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in found] == [
        f"{path}, 128 tokens, {documents}"
        for documents in chip.RULES
        for path in ("einsum", "blockwise")
    ]
    assert all(0 < float(error) < 1e-2 for _, error in found)


@pytest.mark.parametrize(("like", "peak"), [("a100", chip_of("a100").peak["bf16"]), (None, 50e9)])
def test_what_is_measured_becomes_a_chip(monkeypatch, tmp_path, like, peak):
    """Of an unknown device its matmuls are its peak. The rest is as of another chip."""
    monkeypatch.setattr(chip, "product_s", lambda m, k, n: 2 * m * k * n / 50e9)
    monkeypatch.setattr(chip, "timed", lambda path, pattern, given: (None, 1.0, 20e9))
    monkeypatch.setattr(chip, "chip_for", lambda kind: like and chip_of(like))
    chip.main(["rates", "--size", "64", "--chip", str(tmp_path / "mine.yaml")])
    found = chip_of(str(tmp_path / "mine.yaml"))
    assert found.matmul_s(1, 512, 512, 512, "bf16") == pytest.approx(2 * 512**3 / 50e9, rel=1e-2)
    assert found.peak["bf16"] == pytest.approx(peak, rel=1e-2)
    assert found.attention_share * found.peak["bf16"] == pytest.approx(20e9, rel=1e-2)
    assert found.near_bandwidth == chip_of(like or "h100").near_bandwidth
