import jax
import jax.numpy as jnp
import pytest

from shardwright.inspect.compiled.hlo import parse
from tests.inspect.compiled.hlo_texts import TEXT

pytestmark = pytest.mark.quick


def instructions(text):
    return [
        i
        for computation in parse(text).computations.values()
        for i in computation.instructions.values()
    ]


@pytest.mark.parametrize(
    "text", ["", "no program", "HloModule jit_f\n", TEXT[: TEXT.index("ROOT %result")]]
)
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match=r"HLO"):
        parse(text)


def test_every_line_of_a_real_program_is_read():
    """An independent count: instructions are the lines with an equals sign within computations."""

    @jax.jit
    def f(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), c.sum()), x, length=3)

    compiled = f.lower(jnp.ones((4, 4))).compile()
    body = compiled.as_text().split("\n\n", 1)[1]
    lines = [line for line in body.splitlines() if line.startswith("  ") and " = " in line]
    found = instructions(compiled.as_text())
    assert len(found) == len(lines)
    (loop,) = (i for i in found if i.opcode == "while")
    reads = [i for i in found if i.opcode == "get-tuple-element"]
    assert all(f"index={i.index}" in i.attributes for i in reads)
    assert parse(compiled.as_text()).turns(loop) == 3
    here = {frame.line for i in found for frame in i.frames if frame.file == __file__}
    assert f.__wrapped__.__code__.co_firstlineno + 2 in here


@pytest.mark.parametrize(
    ("condition", "turns"),
    [
        ("compare(%i.1, %bound), direction=LT", 7),
        ("compare(%i.1, %bound), direction=GT", None),
        ("compare(%bound, %i.1), direction=LT", None),
        ("and(%i.1, %bound)", None),
    ],
)
def test_turns_are_read_from_the_condition_where_the_compiler_does_not_tell(condition, turns):
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    counts = f"""%i.1 = s32[] get-tuple-element(%c.1), index=0
  %bound = s32[]{{:T(128)}} constant(7)
  ROOT %less = pred[] {condition}"""
    program = parse(text.replace("ROOT %less = pred[] constant(true)", counts))
    assert program.turns(program.entry.instructions["loop"]) == turns


def test_an_instruction_may_go_over_lines():
    """As libtpu writes kernels of Pallas."""
    kernel = """%kernel = f32[4,8]{1,0} custom-call(%x.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(f)/splash" stack_frame_id=1}
  %zero ="""
    program = parse(TEXT.replace("%zero =", kernel))
    assert program.entry.instructions["kernel"].op_name == "jit(f)/splash"
    assert {*program.entry.instructions} == {*parse(TEXT).entry.instructions, "kernel"}
