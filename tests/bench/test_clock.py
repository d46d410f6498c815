"""bench.plan.clock: XLA's prediction of a step."""

import dataclasses

import pytest

from bench.plan.clock import Clock
from shardwright.cluster.chips import chip_of
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.program.compiling import with_mesh
from tests.support.annotated_program import FACTS, TEXT
from tests.support.hlo_texts import HEAD

US = 1e-6
# bytes of a batched product and of one with wider results, at 1e6 a second
ROOFLINE = (8 * 3 * 64 + 4 * 64) / 1e6


def test_xlas_prediction_of_a_program_by_hand():
    """The wait for the gather, less the product meanwhile; three turns; five of six ticks; all of
    the scatter.
    """
    program = parse(with_mesh(TEXT, {"d": 4}))
    chip = dataclasses.replace(chip_of("h100"), memory_bandwidth=8e6 / 8, peak={"bf16": 1e15})
    clock = Clock(program, describe(program), chip, FACTS)
    total = clock.seconds(program.entry)
    scatter = 100 * US * 400 / 374
    assert total == pytest.approx((40 + 60 + 3 * 10 + 5 * 60) * US + ROOFLINE + scatter, rel=1e-9)
    assert clock.lines["train.py:10"] == pytest.approx(60 * US + scatter)
    assert sum(clock.lines.values()) == pytest.approx(total)
    assert clock.exposed == pytest.approx({"train.py:10": 60 * US + scatter})


def test_attention_by_its_flops():
    """Two products forward and five backward, of half of the pairs: 2·2·L²/2·D of a head, and 2.5
    times it.
    """
    call = 'custom-call(%q, %k), custom_call_target="__cudnn$fmha{}"'
    lines = "".join(
        f"  %{name} = bf16[2,8,3,16]{{3,2,1,0}} {text}\n"
        for name, text in (
            ("q", "parameter(0)"),
            ("f", call.format("Softmax")),
            ("b", call.format("SoftmaxBackward")),
        )
    )
    text = (
        f"{HEAD}ENTRY %main (q: bf16[2,8,3,16], k: bf16[2,8,3,16]) -> bf16[2,8,3,16] "
        f"{{\n{lines}}}\n"
    )
    program = parse(text.replace("  %f", "  %k = bf16[2,8,3,16]{3,2,1,0} parameter(1)\n  %f"))
    chip = dataclasses.replace(chip_of("h100"), peak={"bf16": 1e9})

    def seconds(rate):
        return Clock(program, describe(program), chip, FACTS, rate).seconds(program.entry)

    forward = 2 * 2 * 2 * 3 * 8**2 / 2 * 16
    assert (seconds(0.5), seconds(0.0)) == (pytest.approx(3.5 * forward / 0.5e9), 0)
