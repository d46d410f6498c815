"""How to call each primitive of which JAX has a function."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardlib.interpret import equations_in, program_of

SHAPE = (3, 4)
MORE = {
    "add_any": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(x)))(x),
    "and": lax.bitwise_and,
    "complex": lax.complex,
    "copy": lambda x: jnp.array(x, copy=True),
    "convert_element_type": lambda x: x.astype(jnp.float16),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "logistic": lambda x: lax.logistic(x),
    "not": lax.bitwise_not,
    "one_minus_square": lambda x: jax.grad(lambda x: jnp.sum(jnp.tanh(x)))(x),
    "or": lax.bitwise_or,
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "select_n": lambda b, x, y: lax.select_n(b, x, y),
    "sqrt": lambda x: lax.sqrt(x),
    "xor": lax.bitwise_xor,
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, *SHAPE), (1, 2)),
    "reshape": lambda x: lax.reshape(x, (4, 3)),
    "squeeze": lambda x: lax.squeeze(lax.expand_dims(x, (1,)), (1,)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "reduce_max": lambda x: jnp.max(x, axis=1),
    "reduce_min": lambda x: jnp.min(x, axis=1),
    "reduce_prod": lambda x: jnp.prod(x, axis=1),
    "reduce_sum": lambda x: jnp.sum(x, axis=1),
    "reduce_and": lambda n: jnp.all(n > 0, axis=1),
    "reduce_or": lambda n: jnp.any(n > 0, axis=1),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, axis=1),
    "cummax": lambda x: lax.cummax(x, axis=1),
    "cummin": lambda x: lax.cummin(x, axis=1),
    "cumprod": lambda x: lax.cumprod(x, axis=1),
    "cumsum": lambda x: lax.cumsum(x, axis=1),
}
"""How to call a primitive, if jax.lax has no function of its name."""
RANDOM = np.random.default_rng(0)
OPERANDS = {
    "f": lambda: RANDOM.uniform(0.1, 0.9, SHAPE).astype(np.float32),
    "i": lambda: RANDOM.integers(1, 7, SHAPE).astype(np.int32),
    "b": lambda: RANDOM.random(SHAPE) < 0.5,
    "c": lambda: (RANDOM.random(SHAPE) + 1j * RANDOM.random(SHAPE)).astype(np.complex64),
}


@functools.cache
def call_of(name):
    """The equation of a primitive, as a function, and the operands on which JAX takes it; None
    without one.
    """
    function = MORE.get(name) or getattr(lax, name, None)
    if function is None:
        return None
    counts = [len(inspect.signature(function).parameters)] if name in MORE else [1, 2, 3]
    for count in counts:
        for kinds in ("f", "i", "b", "c", "if", "bff", "fff"):
            given = [
                OPERANDS[kind]() for kind in (kinds if len(kinds) == count else kinds[0] * count)
            ]
            try:
                traced = jax.make_jaxpr(function)(*given)
            except (TypeError, ValueError):
                continue
            found = [eqn for eqn in equations_in(traced) if eqn.primitive.name == name]
            if found:
                program = program_of(found[0], found[0].invars)
                kinds = [np.dtype(var.aval.dtype).kind for var in found[0].invars]
                values = [OPERANDS[kind]() for kind in kinds]
                fits = [
                    x if var.aval.shape else x[0, 0]
                    for x, var in zip(values, found[0].invars, strict=True)
                ]
                shaped = [
                    np.resize(x, var.aval.shape).astype(var.aval.dtype)
                    for x, var in zip(fits, found[0].invars, strict=True)
                ]
                return jaxpr_as_fun(jax.extend.core.ClosedJaxpr(program, [])), shaped
    return None
