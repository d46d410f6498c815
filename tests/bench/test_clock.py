"""bench.plan.clock: XLA's prediction of a step."""

import dataclasses
import types

import pytest

from bench.plan.clock import Clock, attention_matmuls
from shardwright.cluster.chips import chip_of
from shardwright.inspect.compiled.hlo import parse
from shardwright.inspect.compiled.step import describe
from shardwright.program.compiling import with_mesh
from tests.support.annotated_program import AT, FACTS, TEXT
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


def test_what_no_gather_tells_is_timed_by_links_and_loops_by_their_mean():
    """An exchange over other axes than any gather; a loop of unknown length."""
    text = TEXT.replace('"known_trip_count":{"n":"3"}', "")
    swap = (
        f"%a = f32[4,4]{{1,0}} all-to-all-start(%x), "
        f"replica_groups={{{{0,1}},{{2,3}}}}{AT.format('swap', 1)}"
    )
    text = text.replace("ROOT %s.1", f"{swap}\n  ROOT %s.1")
    program = parse(with_mesh(text, {"d": 2, "e": 2}))
    chip = chip_of("h100")
    clocks = [
        Clock(program, describe(program), chip, FACTS | {"unknown_turns": turns})
        for turns in (2.5, 4)
    ]
    few, more = (clock.seconds(program.entry) for clock in clocks)
    assert more - few == pytest.approx(1.5 * 10 * US)
    exchange = clocks[0].of_collective(program.entry, program.entry.instructions["a"])
    assert exchange == pytest.approx(chip.collective_s("all_to_all", 64, program.mesh, ["e"]))


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


@pytest.mark.parametrize(
    ("attributes", "op_name", "matmuls"),
    [
        ('custom_call_target="__cudnn$fmhaScaleBiasSoftmax", api', "attend", 2),
        (
            'custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward", api',
            "transpose(jvp(attend))",
            5,
        ),
        (
            'custom_call_target="__gpu$xla.gpu.triton"',
            "jit(step)/jvp(jit(mha))/mha_forward/pallas_call",
            2,
        ),
        (
            'custom_call_target="__gpu$xla.gpu.triton"',
            "jit(step)/transpose(jvp(mha_backward))/pallas_call",
            5,
        ),
        (
            'custom_call_target="__gpu$xla.gpu.triton"',
            "jit(step)/x/preprocess_backward/mha_preprocess_backward/pallas_call",
            0,
        ),
        ('custom_call_target="__cublas$lt$matmul"', "backward/einsum", 0),
    ],
)
def test_kernels_of_attention(attributes, op_name, matmuls):
    assert (
        attention_matmuls(types.SimpleNamespace(attributes=attributes, op_name=op_name)) == matmuls
    )
