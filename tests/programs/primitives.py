"""Programs of primitives that other programs do not use: which dims may be sharded."""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.shardtypes import f32, i32
from tests.programs.program import right, wrong


@right
def convolution_by_one_entry(x: f32["B/d C L/t"], kernel: f32["R C 1"]) -> f32["B/d R L/t"]:
    return lax.conv_general_dilated(x, kernel, (1,), "VALID")


@wrong
def fourier_transform_of_a_block(x: f32["B/d L/t"]) -> f32["B/d L/t"]:
    return jnp.fft.fft(x).real


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")  # here


@right
def mean_pool_of_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d K"]:
    return lax.psum(lax.reduce_window(x @ w, 0.0, lax.add, (1, 2), (1, 2), "VALID"), "t")


@wrong
def max_pool_of_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d K"]:
    return lax.psum(max_pool(x @ w), "t")


@right
def two_reductions_in_one(x: f32["B/d L"]) -> (f32["B/d"], f32["B/d"]):
    return tuple(lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)))


@right(vma=False)
def hessenberg_forms_of_matrices(x: f32["B/d K R"]) -> f32["B/d K R"]:
    return lax.linalg.hessenberg(x)[0]


@right(vma=False)
def products_of_householder_reflections(x: f32["B/d K R"]) -> f32["B/d R"]:
    return lax.linalg.householder_product(x, x[:, 0])[:, 0]


@right
def derivative_of_the_incomplete_gamma_function(x: f32["B/d"]) -> f32["B/d"]:
    return jax.vmap(jax.grad(lambda a: lax.igamma(a, 0.5)))(1 + x * x)


@right
def keys_of_rows(x: i32["B/d 2"]) -> f32["B/d"]:
    return jax.vmap(jax.random.normal)(
        jax.random.clone(jax.random.wrap_key_data(x.astype(jnp.uint32)))
    )


@wrong(vma=False)
def window_of_all_rows_of_a_block(x: f32["B/d C"]) -> f32["B/d C"]:
    return lax.scatter(
        x, jnp.array([0]), jnp.full((4, 1), 5.0), lax.ScatterDimensionNumbers((0, 1), (), (1,))
    )


def filled(x, value):
    return x.at[:, jnp.array([0, 19, 2])].get(mode="fill", fill_value=value)  # here


@wrong
def fives_filled_into_a_partial_sum(x: f32["B/d F/t"], w: f32["F/t M"]) -> f32["B/d 3"]:
    return lax.psum(filled(x @ w, 5.0), "t")


@wrong
def sums_of_8_bits_in_a_matmul_of_32(x: i32["B/d L"], w: i32["L M"]) -> i32["1 M"]:
    total = jnp.sum(x.astype(jnp.int8) * jnp.int8(9), axis=0, dtype=jnp.int8)[None]
    w = w.astype(jnp.int8)
    return lax.psum(lax.dot(total, w, preferred_element_type=jnp.int32), "d")  # here


@right
def columns_subtracted_from(x: f32["B/d L"], y: f32["B/d 2"]) -> f32["B/d L"]:
    return x.at[:, jnp.array([2, 0])].subtract(y)
