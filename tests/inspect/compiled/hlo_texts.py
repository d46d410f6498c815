"""Optimized HLO texts, written by hand."""

HEAD = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[8,8]{1,0}}, num_partitions=4

FileNames
1 "/home/x/shardlib/shardops.py"
2 "/home/x/train.py"
3 "/usr/lib/python3/site-packages/jax/x.py"

FunctionNames
1 "all_gather"
2 "f"
3 "Forward.layers"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=10 end_line=11 column=1 end_column=2}
3 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=2}
4 {file_name_id=3 function_name_id=2 line=99 end_line=99 column=1 end_column=2}
5 {file_name_id=1 function_name_id=3 line=3 end_line=3 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=1}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=2}

"""
"""Frame 1: train.py:10. 2: shardlib, called at train.py:10. 3: train.py:20. 4: a package, called at train.py:20."""

BODY = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused (p0: f32[8,8], p1: f32[8,16]) -> f32[8,16] {
  %p0 = f32[8,8]{1,0} parameter(0)
  %p1 = f32[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot_general" stack_frame_id=4}
}

%body (c: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %c = (s32[], f32[4,8]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%c), index=1
  %half = f32[2,8]{1,0} reduce-scatter(%x), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, to_apply=%sum, metadata={op_name="jit(f)/while/body/psum_scatter" stack_frame_id=2}
  %again = f32[4,8]{1,0} all-gather(%half), channel_id=3, replica_groups={{0,2},{1,3}}, dimensions={0}, metadata={op_name="jit(f)/while/body/all_gather" stack_frame_id=2}
  ROOT %t = (s32[], /*index=1*/f32[4,8]{1,0}) tuple(%i, %again)
}

%cond (c.1: (s32[], f32[4,8])) -> pred[] {
  %c.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x.1: f32[4,8], w: f32[8,16]) -> (f32[8,16], f32[4,8]) {
  %x.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="x"}
  %w = f32[8,16]{1,0} parameter(1), metadata={op_name="w"}
  %start = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x.1), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}, metadata={op_name="jit(f)/all_gather" stack_frame_id=2}
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}) tuple(%zero, %x.1)
  %loop = (s32[], f32[4,8]{1,0}) while(%init), condition=%cond, body=%body, metadata={op_name="jit(f)/while" stack_frame_id=3}, backend_config={"known_trip_count":{"n":"5"}}
  %done = f32[8,8]{1,0} all-gather-done(%start), metadata={op_name="jit(f)/all_gather" stack_frame_id=2}
  %product = f32[8,16]{1,0} fusion(%done, %w), kind=kCustom, calls=%fused, metadata={op_name="jit(f)/add" stack_frame_id=1}
  %last = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %total = f32[4,8]{1,0} all-reduce(%last), channel_id=4, replica_groups={{0,1,2,3}}, to_apply=%sum, metadata={op_name="jit(f)/psum" stack_frame_id=3}
  ROOT %result = (f32[8,16]{1,0}, f32[4,8]{1,0}) tuple(%product, %total)
}
"""

TEXT = HEAD + BODY
