"""The optimized program of a step for H100s, written by hand, with the seconds that XLA
predicts.
"""

from tests.support.hlo_texts import HEAD

COST = ', backend_config={{"reification_cost":[{{"exec_time_us":9,"name":""}},{{"exec_time_us":{},"name":"sol"}}]}}'
AT = ', metadata={{op_name="jit(f)/{}" stack_frame_id={}}}'
GEMM = (
    'custom-call(%{}, %{}), custom_call_target="__cublas$lt$matmul", '
    'backend_config={{{{"gemm_backend_config":{{{{"dot_dimension_numbers":{{{{"lhs_contracting_dimensions":["{}"],"rhs_contracting_dimensions":["{}"],'
    '"lhs_batch_dimensions":[{}],"rhs_batch_dimensions":[{}]}}}}}}}},"reification_cost":[{{{{"exec_time_us":{{}}}}}}]}}}}'
)
PRODUCT = GEMM.format("x", "x", 1, 0, "", "")
BATCHED = GEMM.format("b", "b", 2, 1, '"0"', '"0"')
ALL = "replica_groups={{0,1,2,3}}"
TEXT = f"""{HEAD}%f (p: f32[4,4]) -> f32[4,4] {{
  %p = f32[4,4]{{1,0}} parameter(0)
  ROOT %n = f32[4,4]{{1,0}} negate(%p)
}}

%cond (c.5: f32[4,4]) -> pred[] {{
  ROOT %less = pred[] constant(true)
}}

%body (c: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %c = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %step = f32[4,4]{{1,0}} fusion(%c), kind=kLoop, calls=%f{AT.format("add", 3)}{COST.format(10)}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%c, %step)
}}

%idle (c.2: f32[4,4]) -> f32[4,4] {{
  ROOT %c.2 = f32[4,4]{{1,0}} parameter(0)
}}

%task (c.3: f32[4,4]) -> f32[4,4] {{
  %c.3 = f32[4,4]{{1,0}} parameter(0)
  ROOT %done.3 = f32[4,4]{{1,0}} fusion(%c.3), kind=kLoop, calls=%f{AT.format("task_forward/add", 3)}{COST.format(60)}
}}

%body.2 (c.4: f32[4,4]) -> f32[4,4] {{
  %c.4 = f32[4,4]{{1,0}} parameter(0)
  ROOT %one = f32[4,4]{{1,0}} conditional(%c.4, %c.4, %c.4), true_computation=%task, false_computation=%idle{AT.format("cond", 1)}
}}

ENTRY %main (x: f32[4,4], b: f32[8,4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0){AT.format("", 1).replace("jit(f)/", "state.weights.w")}
  %b = f32[8,4,4]{{1,0}} parameter(1){AT.format("", 1).replace("jit(f)/", "batch.tokens")}
  %g = (f32[4,4]{{1,0}}, f32[16,4]{{1,0}}) all-gather-start(%x), {ALL}, dimensions={{0}}{AT.format("gather", 2)}{COST.format(100)}
  %early = f32[4,4]{{1,0}} {PRODUCT.format(40)}{AT.format("dot", 3)}
  %g.1 = f32[16,4]{{1,0}} all-gather-done(%g)
  %many = f32[8,4,4]{{2,1,0}} {BATCHED.format(5000)}{AT.format("dot", 3)}
  %wide = f64[4,4]{{1,0}} {PRODUCT.format(7000)}{AT.format("dot", 3)}
  %loop = (s32[], f32[4,4]{{1,0}}) while(%x), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %ticks = f32[4,4]{{1,0}} while(%x), condition=%cond, body=%body.2, backend_config={{"known_trip_count":{{"n":"6"}}}}
  %s = (f32[16,4]{{1,0}}, f32[4,4]{{1,0}}) reduce-scatter-start(%g.1), {ALL}, dimensions={{0}}{AT.format("scatter", 2)}, backend_config={{"reification_cost":[]}}
  ROOT %s.1 = f32[4,4]{{1,0}} reduce-scatter-done(%s)
}}
"""
FACTS = {
    "chip": "h100",
    "name": "84m_d8",
    "ticks": 6,
    "local_attention": 4,
    "of_any": {"forward": 5},
}
