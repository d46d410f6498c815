"""bench.chip: attention and rates of one device, here of a small one."""

import re

import jax
import pytest

from bench import chip as program
from shardwright.cluster.chips import chip_of


def main(*arguments: object) -> None:
    program.main([*map(str, arguments)])


@pytest.mark.long
def test_each_implementation_of_attention_agrees_with_f32(capsys):
    main("attention", "--lengths", 128, "--tokens", 256, "--heads", 2, "--width", 16)
    found = re.findall(
        r"^(.+): [\d.]+ ms, .* TFLOP/s, .* GiB, error (.+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert [name for name, _ in found] == [
        f"{path}, 128 tokens, {documents}"
        for documents in program.RULES
        for path in ("einsum", "blockwise")
    ]
    assert all(0 < float(error) < 1e-2 for _, error in found)


@pytest.mark.parametrize(
    ("like", "peak"), [("cpu", 50e9), ("a100", chip_of("a100").peak["bf16"]), (None, 50e9)]
)
def test_what_is_measured_becomes_a_chip(monkeypatch, tmp_path, capsys, like, peak):
    """Of a CPU and of an unknown device, its matmuls are its peak.

    The rest is as of another chip.
    """
    monkeypatch.setattr(program, "product_s", lambda m, k, n: 2 * m * k * n / 50e9)
    monkeypatch.setattr(program, "timed", lambda path, pattern, given: (None, 1.0, 20e9))
    monkeypatch.setattr(program, "chip_for", lambda kind: like and chip_of(like))
    main("rates", "--size", 64, "--chip", tmp_path / "mine.yaml")
    chip = chip_of(str(tmp_path / "mine.yaml"))
    assert chip.matmul_s(1, 512, 512, 512, "bf16") == pytest.approx(2 * 512**3 / 50e9, rel=1e-2)
    assert chip.peak["bf16"] == pytest.approx(peak, rel=1e-2)
    assert chip.attention_share * chip.peak["bf16"] == pytest.approx(20e9, rel=1e-2)
    assert chip.sources["launch_s"] == f"measured by bench.chip rates with jax {jax.__version__}"
    assert chip.near_bandwidth == chip_of(like or "h100").near_bandwidth
    assert capsys.readouterr().out.startswith(f"mine.yaml, like {like or 'h100'}: matmul_share ")
