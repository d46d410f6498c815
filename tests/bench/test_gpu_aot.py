import pytest

from bench.gpu_aot import count, lines_alone
from shardwright.compiled.hlo import parse

TEXT = """HloModule jit_f

%sliced (p: f32[4,8], q: f32[8,4]) -> f32[2,4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  %gemm = f32[4,4]{1,0} custom-call(%p, %q), custom_call_target="__cublas$gemm", backend_config={\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}
  ROOT %whole = f32[2,4,4]{2,1,0} broadcast(%gemm), dimensions={1,2}
}

ENTRY %main (a: f32[4,8], b: f32[8,4], h: bf16[4,8]) -> f32[2,4,4] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %h = bf16[4,8]{1,0} parameter(2)
  %start = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%h), replica_groups={{0,1}}, dimensions={0}
  %in_slice = f32[2,4,4]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%sliced
  %done = bf16[8,8]{1,0} all-gather-done(%start)
  %half = bf16[8,8]{1,0} custom-call(%done, %done), custom_call_target="__cublas$lt$matmul", backend_config={\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}
  %fmha = bf16[8,8]{1,0} custom-call(%half), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={"intermediate_tensor_shape":{"dimensions":["1","1","8","8"]}}
  ROOT %copy = f32[2,4,4]{2,1,0} copy(%in_slice)
}
"""


@pytest.mark.quick
def test_kernels_are_counted_in_slice_fusions_too():
    """Two matmuls, one of them in a fusion and of f32; cuDNN's; a copy; a gather beside the matmul in the fusion."""
    assert count(parse(TEXT)) == [2, 1, 1, 1, 1, 1, 0]


def test_collectives_without_a_matmul_beside_them_are_listed():
    assert lines_alone(parse(TEXT)) == []
    earlier = TEXT.replace("  %done = bf16[8,8]{1,0} all-gather-done(%start)\n", "")
    start = "  %in_slice = f32[2,4,4]"
    text = earlier.replace(start, f"  %done = bf16[8,8]{{1,0}} all-gather-done(%start)\n{start}")
    assert count(parse(text)) == [2, 1, 1, 1, 1, 0, 0]
    (line,) = lines_alone(parse(text))
    assert line.startswith("1 × all-gather over ")
    assert ", 64 bytes each: " in line  # a bf16[4, 8] to one other device
