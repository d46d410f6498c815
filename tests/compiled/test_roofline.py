"""Kernels of a program and their FLOPs and bytes, against counts by hand."""

import pytest

from shardwright.compiled.hlo import parse
from shardwright.compiled.roofline import kernels

FMHA = (
    '"cudnn_fmha_backend_config":{"fmha_scale":0.125,"intermediate_tensor_shape":{"element_type":"BF16",'
    '"dimensions":["2","4","16","16"],"tuple_shapes":[]},"mask_type":"%s"}'
)
TEXT = f"""HloModule jit_f

%turn (x: (f32[3,8], f32[8])) -> (f32[3,8], f32[8]) {{
  %x = (f32[3,8]{{1,0}}, f32[8]{{0}}) parameter(0)
  %stack = f32[3,8]{{1,0}} get-tuple-element(%x), index=0
  %row = f32[8]{{0}} get-tuple-element(%x), index=1
  %written = f32[3,8]{{1,0}} fusion(%stack, %row), kind=kLoop, calls=%write
  %read = f32[8]{{0}} fusion(%written), kind=kLoop, calls=%cut
  ROOT %result = (f32[3,8]{{1,0}}, f32[8]{{0}}) tuple(%written, %read)
}}

%write (p: f32[3,8], q: f32[8]) -> f32[3,8] {{
  %p = f32[3,8]{{1,0}} parameter(0)
  %q = f32[8]{{0}} parameter(1)
  %as_row = f32[1,8]{{1,0}} bitcast(%q)
  %zero = s32[] constant(0)
  ROOT %update = f32[3,8]{{1,0}} dynamic-update-slice(%p, %as_row, %zero, %zero)
}}

%cut (r: f32[3,8]) -> f32[8] {{
  %r = f32[3,8]{{1,0}} parameter(0)
  %same = f32[3,8]{{1,0}} bitcast(%r)
  %part = f32[1,8]{{1,0}} slice(%same), slice={{[1:2], [0:8]}}
  ROOT %flat = f32[8]{{0}} bitcast(%part)
}}

%on (y: (f32[3,8], f32[8])) -> pred[] {{
  %y = (f32[3,8]{{1,0}}, f32[8]{{0}}) parameter(0)
  ROOT %always = pred[] constant(true)
}}

%sliced (a: f32[4,8], b: f32[8,4]) -> f32[2,4,4] {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %b = f32[8,4]{{1,0}} parameter(1)
  %gemm = (f32[4,4]{{1,0}}, s8[1024]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={{\
"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}
  %product = f32[4,4]{{1,0}} get-tuple-element(%gemm), index=0
  ROOT %whole = f32[2,4,4]{{2,1,0}} broadcast(%product), dimensions={{1,2}}
}}

ENTRY %main (c: f32[4,8], d: f32[8,4], e: (f32[3,8], f32[8]), q: bf16[2,16,4,8]) -> f32[2,4,4] {{
  %c = f32[4,8]{{1,0}} parameter(0)
  %d = f32[8,4]{{1,0}} parameter(1)
  %e = (f32[3,8]{{1,0}}, f32[8]{{0}}) parameter(2)
  %q.1 = bf16[2,16,4,8]{{3,2,1,0}} parameter(3)
  %loop = (f32[3,8]{{1,0}}, f32[8]{{0}}) while(%e), condition=%on, body=%turn, backend_config={{\
"known_trip_count":{{"n":"5"}}}}
  %start = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%c), replica_groups={{{{0,1}}}}, dimensions={{0}}
  %in_slice = f32[2,4,4]{{2,1,0}} fusion(%c, %d), kind=kCustom, calls=%sliced
  %done = f32[8,8]{{1,0}} all-gather-done(%start)
  %read.1 = (bf16[2,16,4,8]{{3,2,1,0}}, u8[64]{{0}}) custom-call(%q.1, %q.1, %q.1), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={{{FMHA % "NO_MASK"}}}
  %grad = (bf16[2,16,4,8]{{3,2,1,0}}, u8[64]{{0}}) custom-call(%q.1, %q.1, %q.1), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={{{FMHA % "CAUSAL"}}}
  ROOT %copy = f32[2,4,4]{{2,1,0}} copy(%in_slice)
}}
"""


@pytest.mark.quick
def test_flops_and_bytes_of_kernels():
    found = {kernel.instruction.name: kernel for kernel in kernels(parse(TEXT))}
    kinds = {name: (kernel.kind, kernel.turns) for name, kernel in found.items()}
    assert kinds == {
        "written": ("other", 5),
        "read": ("other", 5),
        "start": ("collective", 1),
        "in_slice": ("matmul", 1),
        "read.1": ("attention", 1),
        "grad": ("attention", 1),
        "copy": ("other", 1),
    }
    row, queries = 8 * 4, 2 * 16 * 4 * 8 * 2
    assert found["written"].bytes == row + row  # not the stack that it writes to
    assert found["read"].bytes == row + row  # not the rows that it leaves
    assert found["in_slice"].bytes == (4 * 8 + 8 * 4 + 2 * 4 * 4) * 4  # not cuBLAS's workspace
    assert found["in_slice"].flops == 2 * 4 * 8 * 4
    assert found["copy"].bytes == 2 * 2 * 4 * 4 * 4
    assert found["read.1"].bytes == 4 * queries
    product = 2 * 2 * 4 * 16 * 16 * 8  # 2 flops for each of B heads L S D
    assert found["read.1"].flops == 2 * product
    assert found["grad"].flops == 5 * product / 2


COPIES = """HloModule jit_f

%stacked (p: f32[3,8], q: f32[1,8], i: s32[]) -> f32[3,8] {
  %p = f32[3,8]{1,0:S(5)} parameter(0)
  %q = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %update = f32[3,8]{1,0:S(5)} dynamic-update-slice(%p, %q, %i, %i)
}

ENTRY %main (stack: f32[3,8], row: f32[1,8], i: s32[]) -> f32[1,8] {
  %stack = f32[3,8]{1,0:S(5)} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %to-start = ((f32[3,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[3,8]{1,0:S(5)}, u32[]) fusion-start(%stack, %row, \
%i.1), kind=kCustom, calls=%stacked
  %to-done = f32[3,8]{1,0:S(5)} fusion-done(%to-start)
  %back-start = (f32[1,8]{1,0}, f32[1,8]{1,0:S(5)}, u32[]) copy-start(%row)
  %back-done = f32[1,8]{1,0} copy-done(%back-start)
  %own-start = (f32[1,8]{1,0}, f32[1,8]{1,0}, u32[]) copy-start(%back-done)
  ROOT %own-done = f32[1,8]{1,0} copy-done(%own-start)
}
"""


@pytest.mark.quick
def test_copies_to_the_host_and_back():
    """As XLA for GPUs writes them, into a stack in a loop, and of a single array."""
    to_host, back, own = kernels(parse(COPIES))
    assert (to_host.kind, back.kind, own.kind) == ("copy", "copy", "other")
    assert to_host.bytes == 2 * 8 * 4 + 4  # a row is read and written, and its number read
    assert back.bytes == own.bytes == 2 * 8 * 4


@pytest.mark.quick
def test_a_kernel_takes_the_longer_of_its_two_times():
    found = {kernel.instruction.name: kernel for kernel in kernels(parse(TEXT))}
    peak = {"f32": 1000.0, "bf16": 2000.0}.get
    assert found["in_slice"].seconds(peak, bandwidth=1e9) == 256 / 1000
    assert found["in_slice"].seconds(peak, bandwidth=1.0) == 384
    assert found["read.1"].seconds(peak, bandwidth=1e9) == found["read.1"].flops / 2000
    assert found["written"].seconds(peak, bandwidth=10.0) == 5 * 64 / 10
