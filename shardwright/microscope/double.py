"""A traced program computed in f64, whatever the dtypes of its floats. What differs then is no rounding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from shardlib.equations import run_again

OF_BITS = ("bitcast_convert_type", "pallas_call", "ffi_call")
"""Primitives whose results depend on the size of a dtype. They keep their own."""


def is_float(dtype: Any) -> bool:
    """Whether a dtype, or anything else, is one of floats."""
    return isinstance(dtype, np.dtype | type) and jnp.issubdtype(dtype, jnp.floating)


def in_f64(x: Any) -> Any:
    """`x`, and in f64 if it is an array of floats. While jax_enable_x64 is on."""
    if not is_float(getattr(x, "dtype", None)):
        return x
    return np.float64(x) if isinstance(x, np.ndarray) else lax.convert_element_type(x, jnp.float64)


def run_in_f64(eqn: Any, jaxpr: Any, ins: list) -> list[jax.Array]:
    """The results of an equation of `jaxpr` without bodies, for operands `in_f64`. Floats are not rounded to others."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if not any(is_float(getattr(var.aval, "dtype", None)) for var in (*eqn.invars, *eqn.outvars)):
        return run_again(eqn, jaxpr, ins)
    if name in OF_BITS:
        own = [x.astype(var.aval.dtype) for x, var in zip(ins, eqn.invars, strict=True)]
        return list(map(in_f64, run_again(eqn, jaxpr, own)))
    if name == "reduce_precision":
        return ins
    params |= {key: np.dtype("float64") for key, value in params.items() if is_float(value)}
    if params.get("update_jaxpr") is not None:  # how a scatter adds
        add = core.jaxpr_as_fun(core.ClosedJaxpr(params["update_jaxpr"], params["update_consts"]))
        params["update_jaxpr"] = jax.make_jaxpr(add)(*[jax.ShapeDtypeStruct((), ins[-1].dtype)] * 2).jaxpr
    outs = eqn.primitive.bind(*ins, **params)
    return outs if eqn.primitive.multiple_results else [outs]
