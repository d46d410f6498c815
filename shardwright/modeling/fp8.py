"""Matmuls with weights in FP8, for accelerators that multiply it faster: NVIDIA's from Hopper on.

With `training.fp8`, the operands of a layer's weight matmuls are rounded to eight bits: activations
and weights to e4m3, gradients to e5m2, which has the wider range (arXiv 2209.05433). Before
rounding, each operand is divided by its own scale, which maps its largest magnitude in this step to
the largest number of the format. Sums are as wide as without FP8. Each device scales its own
blocks, so nothing is communicated, but the rounding depends on the mesh.

The program multiplies the rounded values in the compute dtype. On a Hopper GPU, XLA fuses casts,
scales and matmul into cuBLASLt's FP8 matmul. Elsewhere the result is the same, but slower than
without FP8.
"""

import functools

import jax
import jax.numpy as jnp

FORWARD, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantize(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Divides x by a scale of this device's block, and rounds it to `dtype`.

    Returns the result, and the scale, a scalar of x's dtype.

    If x has an infinity or NaN, the result is NaN.
    """
    peak = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = scale_of(peak, dtype).astype(x.dtype)
    return (x.astype(jnp.float32) / scale.astype(jnp.float32)).astype(dtype), scale


def scale_of(peak: jax.Array, dtype) -> jax.Array:
    """Scale, in f32, that maps `peak` to the largest number of `dtype`."""
    # Rounding to bf16 in _dequantize may make it smaller, but so little that the peak still rounds
    # to the largest.
    scale = peak.astype(jnp.float32) / jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)  # for an x of zeros


def _dequantize(x: tuple[jax.Array, jax.Array]) -> jax.Array:
    rounded, scale = x
    return rounded.astype(scale.dtype) * scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """jnp.einsum(formula, x, y) of the rounded operands.

    Gradients multiply these by the rounded gradient.

    Each dim of an operand must be in the other operand or in the result.
    """
    return _forward(formula, x, y)[0]


def _forward(formula, x, y):
    x, y = quantize(x, FORWARD), quantize(y, FORWARD)
    return jnp.einsum(formula, _dequantize(x), _dequantize(y)), (x, y)


def _backward(formula, operands, g):
    x, y = map(_dequantize, operands)
    g = _dequantize(quantize(g, GRADIENTS))
    operand_dims, result = formula.split("->")
    x_dims, y_dims = operand_dims.split(",")
    return jnp.einsum(f"{result},{y_dims}->{x_dims}", g, y), jnp.einsum(
        f"{x_dims},{result}->{y_dims}", x, g
    )


product.defvjp(_forward, _backward)
