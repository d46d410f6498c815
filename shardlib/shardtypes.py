"""Sharding types: `f32['M/d F/t']` on dataclass fields, arguments, results and annotated locals, checked as JAX traces.

    @pytree_dataclass
    class Layer:
        w_up: f32['M/d F/t']                     # at rest: M sharded over d, F sharded over t

    @typed_shard_map
    def forward(x: f32['B/d M'], w: Layer) -> f32['B/d F/t']:
        w_up: f32['M F/t'] = shardops.all_gather('M/d F/t -> M F/t', w.w_up)
        return shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w_up)

The grammar of the specs is in parsing.py; docs/sharding-types.md explains them.
`dtype_name('act')` is a dtype that each trace binds: `with Scope(act=jnp.bfloat16):`.
"""

# ruff: noqa: F401 (other rooms import these names from here)

from shardlib.array_types import (
    Array,
    ArrayType,
    Factor,
    Separate,
    Subset,
    bf16,
    bool_,
    dtype_name,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    make_shardings,
    map_arrays,
    pytree_dataclass,
    u8,
    u16,
    u32,
    u64,
)
from shardlib.functions import register_with_typeguard, typed, typed_shard_map
from shardlib.parsing import ShardError
from shardlib.scopes import Scope, scope
from shardlib.values import Copy, Partial, pipeline_stage
