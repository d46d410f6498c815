"""Sharding types, such as `f32['M/d F/t']`, checked as JAX traces.

They stand on dataclass fields, arguments, results and annotated locals.

    @pytree_dataclass
    class Layer:
        w_up: f32['M/d F/t']                     # at rest: M sharded over d, F sharded over t

    @typed_shard_map
    def forward(x: f32['B/d M'], w: Layer) -> f32['B/d F/t']:
        w_up: f32['M F/t'] = shardops.all_gather('M/d F/t -> M F/t', w.w_up)
        return shardops.einsum_unreduced('B/d M, M F/t -> B/d F/t', x, w_up)

The grammar of the specs is in parsing.py; docs/sharding-types.md explains them. `dtype_name('act')`
is a dtype that each trace binds: `with Scope(act=jnp.bfloat16):`. Type checkers accept no variable
in an annotation. To make them read it as any array:

    if TYPE_CHECKING:
        from shardlib.shardtypes import AnyArray as act
    else:
        act = dtype_name('act')
"""

# ruff: noqa: F401 (other modules import these names from here)

from typing import TYPE_CHECKING, Any, Protocol

from shardlib.array_types import (
    ArrayType,
    Factor,
    arrays_in,
    dtype_name,
    make_shardings,
    map_arrays,
    pytree_dataclass,
)
from shardlib.functions import register_with_typeguard, typed, typed_shard_map
from shardlib.mesh import pipeline_stage
from shardlib.opaque import Copy, Partial
from shardlib.parsing import ShardError
from shardlib.scopes import Scope, scope

if TYPE_CHECKING:

    class AnyArray(Protocol, Any):  # pyright: ignore[reportGeneralTypeIssues] (Any is no protocol)
        """What a type checker sees instead of a dtype.

        `f32['B/d M']` accepts any value, and is accepted anywhere. A protocol without members
        accepts any value; deriving from Any gives a value every attribute; and `__class_getitem__`
        allows any string as subscript.
        """

        def __class_getitem__(cls, spec: Any): ...

    Array = AnyArray
    Of = AnyArray
    Separate = AnyArray
    Subset = AnyArray
    bf16 = AnyArray
    bool_ = AnyArray
    f16 = AnyArray
    f32 = AnyArray
    f64 = AnyArray
    i8 = AnyArray
    i16 = AnyArray
    i32 = AnyArray
    i64 = AnyArray
    u8 = AnyArray
    u16 = AnyArray
    u32 = AnyArray
    u64 = AnyArray
else:
    from shardlib.array_types import (
        Array,
        Of,
        Separate,
        Subset,
        bf16,
        bool_,
        f16,
        f32,
        f64,
        i8,
        i16,
        i32,
        i64,
        u8,
        u16,
        u32,
        u64,
    )
