r"""Checks the shard_map parts of public JAX libraries, and compares their numbers on several
devices and on one.

`python -m bench.other_trainers` prints a table, which docs/other-trainers.md sums up. Each
function is taken as it is installed. Packages that are missing are named, and their rows left out.
Install them beside shardwright, without CUDA or torch:

    pip install ringattention==0.1.2 ejkernel==0.0.80.3 flax==0.12.8 optax==0.2.8
    pip install --no-deps --ignore-requires-python maxtext==0.2.5 aqtp qwix simplejson \
        pathwaysutils fastapi starlette uvicorn marin-levanter==0.2.227.dev40316220070 \
        marin-haliax==0.2.227.dev40316220070 equinox
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import math
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":  # before jax starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.exact import check
from shardlib.parsing import ShardError

VERSIONS = {
    "ringattention": "0.1.2",
    "ejkernel": "0.0.80.3",
    "flax": "0.12.8",
    "optax": "0.2.8",
    "maxtext": "0.2.5",
    "marin-levanter": "0.2.227.dev40316220070",
}
"""The packages and versions that docs/other-trainers.md is about."""
TOLERANCE = 1e-5
"""Largest difference of results that count as equal, relative to the largest entry."""
ACCEPTED, NOT_DECIDED, WRONG = "accepted", "not decided", "wrong"
ALL, ROWS, COLUMNS = P(), P("t"), P(None, "t")


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of another library on small arrays.

    Attributes:
        package: the distribution that has it.
        function: its name, and how it is called.
        is_equal: True if several devices compute what one device computes.
        make: imports the package, and returns the body of shard_map; without in_specs, a function
            that maps.
        args: shapes of float32 arrays, or arrays.
        reason: why it is not equal.
        takes: for a function that maps, the specs of its arguments.
    """

    package: str
    function: str
    is_equal: bool
    make: Callable[[], Callable[..., Any]]
    args: tuple[Any, ...]
    in_specs: Any = None
    out_specs: Any = None
    reason: str = ""
    axes: tuple[tuple[str, int], ...] = (("t", 4),)
    check_vma: bool = False
    takes: tuple[Any, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.package} {self.function}"


def version(package: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def module(name: str) -> Any:
    """Imports a module, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return importlib.import_module(name)


def ring_attention_module() -> Any:
    """The JAX form of ringattention: its __init__ needs jax.lib.xla_bridge, which newer versions of
    JAX lack.
    """
    (path,) = (
        f
        for f in importlib.metadata.files("ringattention") or ()
        if f.name == "ringattention_jax.py"
    )
    spec: Any = importlib.util.spec_from_file_location("ringattention_jax", str(path.locate()))
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


# Arrays of numpy, because a file that is only collected starts no computation of jax.
def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, below, shape, np.int32)


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `function` returns, and the gradients of its arguments; its last argument is the
    result's cotangent.
    """

    def body(*args: Any) -> Any:
        result, backward = jax.vjp(function, *args[:-1])
        return result, *backward(args[-1])

    return body


# ---- the functions -------------------------------------------------------------------------------

QKV = ((2, 16, 2, 4),) * 3


def of_liu(dropout: float = 0.0) -> Callable[..., Any]:
    options = {
        "causal_block_size": 1,
        "query_chunk_size": 2,
        "key_chunk_size": 2,
        "deterministic": not dropout,
        "dropout_rng": jax.random.PRNGKey(0),
        "attn_pdrop": dropout,
        "dtype": jnp.float32,
        "precision": None,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "prevent_cse": True,
    }
    attend = ring_attention_module().ring_attention
    return lambda q, k, v: attend(q, k, v, None, None, None, "t", True, options)


def ejkernel(name: str, **options: Any) -> Callable[..., Any]:
    return functools.partial(getattr(module(f"ejkernel.kernels._xla.{name}"), name), **options)


def cross_entropy(x: jax.Array, targets: jax.Array | None, **options: Any) -> jax.Array:
    return ejkernel("fused_cross_entropy", vocab_parallel_axis="t")(x, targets, **options)[0]


def linear_cross_entropy(h: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
    linear = module(
        "ejkernel.kernels._xla.fused_cross_entropy._xla_impl_linear"
    ).fused_linear_cross_entropy
    options = {
        "token_chunk_size": 4,
        "compute_dtype": jnp.float32,
        "vocab_parallel_axis": "t",
        "reduction": "sum",
    }
    return linear(h, targets, weights, lm_head_weight=w, **options)


def divergence(direction: str) -> Callable[..., Any]:
    loss = ejkernel("fused_kl_divergence", direction=direction, vocab_parallel_axis="t")
    return jax.value_and_grad(loss)


def norm(name: str, **options: Any) -> Callable[..., Any]:
    layer = getattr(module("flax.linen"), name)(axis_name="t", **options)
    if name != "BatchNorm":
        return lambda x: layer.apply({}, x)
    state = {"batch_stats": {"mean": jnp.zeros(6), "var": jnp.ones(6)}}
    return gradients(
        lambda scale, x: layer.apply({"params": scale} | state, x, mutable=["batch_stats"])[0]
    )


def update(name: str, **options: Any) -> Callable[..., Any]:
    """One step of an optimizer on a matrix, from its initial state."""
    optax = module("optax")
    rule = getattr(optax, name, None) or getattr(optax.contrib, name)

    def step(w: jax.Array, g: jax.Array) -> jax.Array:
        optimizer = rule(0.1, **options)
        return optimizer.update({"w": g}, optimizer.init({"w": w}), {"w": w})[0]["w"]

    return step


def ulysses() -> Callable[..., Any]:
    of = module("maxtext.kernels.attention.ulysses_attention")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (of.ulysses_all_to_all(x, "t") for x in (q, k, v))
        p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
        return of.inverse_ulysses_all_to_all(jnp.einsum("bhqk,bhkd->bhqd", p, v), "t")

    return attend


def delta_net() -> Callable[..., Any]:
    of = module("maxtext.kernels.attention.gdn_cp")
    return lambda w, u, k, g, h: of.incoming_state(
        *of.compose_local(0.1 * w, u, 0.1 * k, g), h, "t"
    )[1]


def stage_shift() -> Callable[..., Any]:
    of = module("maxtext.layers.pipeline").NNXPipeline
    config = types.SimpleNamespace(
        num_pipeline_repeats=1,
        pipeline_delay_activation_forwarding=False,
        num_pipeline_microbatches=8,
    )

    def shift(out: jax.Array, io: jax.Array) -> jax.Array:
        here = types.SimpleNamespace(
            mesh=jax.sharding.get_abstract_mesh(),
            stages_in_spec=P("stage"),
            state_io_spec=P("stage"),
            config=config,
            use_circ_storage=False,
            microbatches_per_stage=2,
        )
        names = ("circ_storage", "circ_storage_mover", "prev_outputs", "shift")
        return of.get_new_loop_state(
            here, out, dict.fromkeys(names) | {"state_io": io, "loop_iteration": 0}
        )["shift"]

    return shift


EXPERTS, TOKENS = 8, 32
CHOSEN = np.argsort(np.random.default_rng(0).random((TOKENS, EXPERTS)), axis=1)[:, :2].astype(
    np.int32
)
OF_EXPERTS = (
    (TOKENS, 6),
    CHOSEN,
    (TOKENS, 2),
    np.ones(TOKENS, bool),
    (EXPERTS, 6, 8),
    (EXPERTS, 4, 6),
)


def experts(way: str, capacity: float) -> Callable[..., Any]:
    options: dict[str, Any] = {
        "num_experts": EXPERTS,
        "token_sharding_axes": ("expert",),
        "capacity_factor": capacity,
    }
    if way == "ring":
        of = module("levanter.grug._moe.ep_ring")
        run = functools.partial(
            of._moe_mlp_ep_ring_local, make_dispatch_combine=of._scatter_add_dispatch_combine
        )
    else:
        run = module("levanter.grug._moe.ep_fixed_all_to_all")._moe_mlp_ep_fixed_a2a_local
    return lambda *args: run(*args, activation_fn=jax.nn.silu, **options)[0]


def of_batch_shards() -> Callable[..., Any]:
    estimate = module("levanter.grug.grug_moe").estimate_qb_beta_topk
    options: dict[str, Any] = {"batch_axes": ("t",), "num_experts_per_token": 2, "num_experts": 4}
    return lambda scores, valid: estimate(
        scores, valid, jax.sharding.get_abstract_mesh(), **options
    )


def short_conv() -> Callable[..., Any]:
    return functools.partial(
        module("levanter.kernels.triton.short_conv.api").short_conv, batch_axes=()
    )


def moe(function: str, way: str, capacity: float, is_equal: bool) -> Case:
    make, axis = functools.partial(experts, way, capacity), P("expert")
    of = "marin-levanter", f"{function}, {'enough capacity' if is_equal else 'capacity factor 1'}"
    reason = "" if is_equal else "by design: devices drop what exceeds their slots"
    return Case(*of, is_equal, make, OF_EXPERTS, axis, axis, reason, (("expert", 4),))


DOCUMENTS = np.arange(2048, dtype=np.int32)[None] // 256
ONES = np.ones(8, np.float32)
LOGITS, TARGETS = (8, 16), integers(16, 8)
SOFT_TARGETS = np.random.default_rng(1).dirichlet(np.ones(16), 8).astype(np.float32)
PADDED = np.where(np.arange(16) < 12, numbers(8, 16), np.float32(-np.inf))
MATMULS = (
    "all_gather_matmul",
    ((8, 12), (12, 16), (8, 16)),
    (ROWS, COLUMNS, COLUMNS),
    (COLUMNS, ROWS, COLUMNS),
)
SCATTERS = (
    "reduce_scatter_matmul",
    ((8, 12), (16, 12), (8, 16)),
    (COLUMNS, COLUMNS, ROWS),
    (ROWS, COLUMNS, COLUMNS),
)
CASES = [
    Case(
        "ringattention",
        "ring_attention, causal, with gradients",
        True,
        lambda: gradients(of_liu()),
        (*QKV, QKV[0]),
        COLUMNS,
        COLUMNS,
    ),
    Case(
        "ringattention",
        "ring_attention with dropout",
        False,
        lambda: of_liu(0.3),
        QKV,
        COLUMNS,
        COLUMNS,
        "**bug 2**",
    ),
    *(
        Case(
            "ejkernel",
            f"{name} with gradients",
            True,
            functools.partial(lambda name: gradients(ejkernel(name, axis_name="t")), name),
            args,
            specs,
            outs,
        )
        for name, args, specs, outs in (MATMULS, SCATTERS)
    ),
    Case(
        "ejkernel",
        "fused_cross_entropy, vocabulary-parallel",
        True,
        lambda: cross_entropy,
        (LOGITS, TARGETS),
        (COLUMNS, ALL),
        ALL,
    ),
    Case(
        "ejkernel",
        "fused_cross_entropy, gradient",
        True,
        lambda: jax.grad(cross_entropy),
        (LOGITS, TARGETS),
        (COLUMNS, ALL),
        COLUMNS,
    ),
    Case(
        "ejkernel",
        "fused_cross_entropy, soft targets, with gradients",
        True,
        lambda: jax.value_and_grad(lambda x, soft: cross_entropy(x, None, soft_targets=soft)),
        (LOGITS, SOFT_TARGETS),
        COLUMNS,
        (ALL, COLUMNS),
    ),
    Case(
        "ejkernel",
        "fused_cross_entropy, a device's logits all -inf",
        False,
        lambda: cross_entropy,
        (PADDED, integers(12, 8)),
        (COLUMNS, ALL),
        ALL,
        reason="**bug 3**",
    ),
    Case(
        "ejkernel",
        "fused_linear_cross_entropy: loss, accuracy",
        True,
        lambda: linear_cross_entropy,
        ((8, 6), (6, 16), TARGETS, ONES),
        (ALL, COLUMNS, ALL, ALL),
        ALL,
        check_vma=True,
    ),
    Case(
        "ejkernel",
        "fused_kl_divergence, forward, gradients",
        True,
        lambda: divergence("forward"),
        (LOGITS, LOGITS),
        COLUMNS,
        (ALL, COLUMNS),
    ),
    Case(
        "ejkernel",
        "fused_kl_divergence, reverse, gradients, check_vma=True",
        True,
        lambda: divergence("reverse"),
        (LOGITS, numbers(8, 16, seed=1)),
        COLUMNS,
        (ALL, COLUMNS),
        check_vma=True,
    ),
    Case(
        "ejkernel",
        "fused_kl_divergence, reverse, gradients, check_vma=False",
        False,
        lambda: divergence("reverse"),
        (LOGITS, numbers(8, 16, seed=1)),
        COLUMNS,
        (ALL, COLUMNS),
        "psum summed again in the gradient; the library sets check_vma=True",
    ),
    Case(
        "ejkernel",
        "ring_attention, causal, sinks, window",
        True,
        lambda: (
            lambda *x: ejkernel(
                "ring_attention", axis_name="t", causal=True, sliding_window=(5, 0)
            )(*x[:3], softmax_aux=x[3])
        ),
        (*QKV, (3,)),
        (COLUMNS, COLUMNS, COLUMNS, ALL),
        COLUMNS,
    ),
    Case(
        "ejkernel",
        "ring_attention, segment ids, 1024 tokens a device",
        False,
        lambda: ejkernel("ring_attention", axis_name="t", causal=True),
        (*((1, 2048, 1, 8),) * 3, DOCUMENTS, DOCUMENTS),
        COLUMNS,
        COLUMNS,
        "**bug 1**",
        (("t", 2),),
    ),
    Case(
        "ejkernel",
        "ring_attention, causal, 1 token a device",
        False,
        lambda: ejkernel("ring_attention", axis_name="t", causal=True),
        ((2, 4, 2, 4),) * 3,
        COLUMNS,
        COLUMNS,
        "**bug 4**",
    ),
    Case(
        "flax",
        "BatchNorm(axis_name), with gradients",
        True,
        lambda: norm("BatchNorm", use_running_average=False),
        ({"scale": ONES[:6], "bias": 0 * ONES[:6]}, (16, 6), (16, 6)),
        (ALL, ROWS, ROWS),
        (ROWS, ALL, ROWS),
        check_vma=True,
    ),
    Case(
        "flax",
        "RMSNorm(axis_name), features sharded",
        True,
        lambda: norm("RMSNorm", use_scale=False),
        ((6, 16),),
        COLUMNS,
        COLUMNS,
    ),
    Case(
        "flax",
        "GroupNorm(axis_name), positions sharded",
        True,
        lambda: norm("GroupNorm", num_groups=4, use_bias=False, use_scale=False),
        ((4, 16, 8),),
        COLUMNS,
        COLUMNS,
    ),
    Case(
        "flax",
        "GroupNorm(axis_name), batch sharded",
        False,
        lambda: norm("GroupNorm", num_groups=4, use_bias=False, use_scale=False),
        ((16, 4, 8),),
        ROWS,
        ROWS,
        "averages different sequences: meant for sharded positions",
    ),
    Case("optax", "adamw, rows sharded", True, lambda: update("adamw"), ((16, 4),) * 2, ROWS, ROWS),
    Case(
        "optax",
        "contrib.muon, whole matrices",
        True,
        lambda: update("muon"),
        ((16, 4),) * 2,
        ALL,
        ALL,
    ),
    Case(
        "optax",
        "contrib.muon, rows sharded",
        False,
        lambda: update("muon"),
        ((16, 4),) * 2,
        ROWS,
        ROWS,
        "no collectives: meant for whole matrices",
    ),
    Case(
        "optax",
        "adafactor, rows sharded",
        False,
        lambda: update("adafactor", min_dim_size_to_factor=2),
        ((16, 4),) * 2,
        ROWS,
        ROWS,
        "no collectives: meant for whole matrices",
    ),
    Case(
        "maxtext",
        "Ulysses attention: all_to_all, back",
        True,
        ulysses,
        ((2, 8, 16, 4),) * 3,
        P(None, None, "t"),
        P(None, None, "t"),
    ),
    Case(
        "maxtext",
        "shmap_collective_matmul",
        True,
        lambda: module("maxtext.examples.shmap_collective_matmul").collective_matmul.__wrapped__,
        ((2, 16, 8), (8, 8, 4)),
        (P(None, "tp"), P(None, "tp")),
        P(None, None, "tp"),
        axes=(("tp", 4),),
    ),
    Case(
        "maxtext",
        "gdn_cp: prefix scan of GatedDeltaNet states",
        True,
        delta_net,
        ((8, 2, 3, 4), (8, 2, 3, 5), (8, 2, 3, 4), (8, 2, 3), (2, 4, 5)),
        (*(ROWS,) * 4, ALL),
        ALL,
    ),
    Case(
        "maxtext",
        "pipeline: shift to the next stage",
        False,
        stage_shift,
        ((4, 3, 5), (4, 2, 3, 5)),
        axes=(("stage", 4),),
        reason="by design: the number of stages is that of devices",
    ),
    moe("MoE ring", "ring", 8.0, True),
    moe("MoE fixed_all_to_all", "fixed", 8.0, True),
    moe("MoE fixed_all_to_all", "fixed", 1.0, False),
    Case(
        "marin-levanter",
        "estimate_qb_beta_topk",
        False,
        of_batch_shards,
        ((TOKENS, 4), np.ones(TOKENS, bool)),
        reason="by design: a mean of the devices' own thresholds",
        takes=(P("t", None), P("t")),
    ),
    Case(
        "marin-levanter",
        "short_conv, positions sharded",
        True,
        short_conv,
        ((4, 6), (2, 32, 6)),
        takes=(ALL, P(None, "t", None)),
    ),
]


# ---- what is said of them ------------------------------------------------------------------------


def arguments(case: Case) -> list[Any]:
    def draw(x, i):
        return numbers(*x, seed=i) if isinstance(x, tuple) else x

    return [jax.tree.map(jnp.asarray, draw(x, i)) for i, x in enumerate(case.args)]


def kind_of(case: Case) -> AxisType:
    return AxisType.Explicit if case.takes else AxisType.Auto


def verdict(case: Case) -> tuple[str, str]:
    """What `check` says of a function, and its message."""
    names, sizes = [axis for axis, _ in case.axes], [size for _, size in case.axes]
    mesh = AbstractMesh(tuple(sizes), tuple(names), axis_types=(kind_of(case),) * len(names))
    args = arguments(case)
    if case.takes:
        args = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(args, case.takes, strict=True)
        ]
    specs = {"in_specs": case.in_specs, "out_specs": case.out_specs, "check_vma": case.check_vma}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check(case.make(), *args, mesh=mesh, **(specs if case.in_specs is not None else {}))
    except ShardError as error:
        return WRONG if str(error).rpartition("\n")[2].startswith(WRONG) else NOT_DECIDED, str(
            error
        )
    return ACCEPTED, ""


def difference(case: Case) -> float:
    """Largest difference between the results of several devices and of one, relative to the largest
    entry.
    """
    found = []
    for is_one in (False, True):
        names, sizes = (
            [axis for axis, _ in case.axes],
            [1 if is_one else size for _, size in case.axes],
        )
        devices = jax.devices()[: math.prod(sizes)]
        mesh = jax.make_mesh(
            sizes, names, axis_types=(kind_of(case),) * len(names), devices=devices
        )
        args, run = arguments(case), case.make()
        if case.in_specs is not None:
            specs = {
                "in_specs": case.in_specs,
                "out_specs": case.out_specs,
                "check_vma": case.check_vma,
            }
            run = jax.shard_map(run, mesh=mesh, **specs)
        takes = [NamedSharding(mesh, spec) for spec in case.takes]
        args = [jax.device_put(x, s) for x, s in zip(args, takes, strict=True)] if takes else args
        with jax.set_mesh(mesh), contextlib.redirect_stdout(io.StringIO()):
            found.append([np.asarray(x, np.float64) for x in jax.tree.leaves(jax.jit(run)(*args))])

    def scale(a, b):
        return np.abs(b).max() or np.abs(a).max() or 1.0

    return float(np.max([np.abs(a - b).max() / scale(a, b) for a, b in zip(*found, strict=True)]))


def number_text(found: float) -> str:
    return (
        "equal"
        if found <= TOLERANCE
        else f"differs by {100 * found:.0f} %"
        if math.isfinite(found)
        else "NaN"
    )


def row(case: Case, said: str, compared: str) -> str:
    return f"| {case.package} | {case.function} | {said} | {compared} | {case.reason} |"


def rows() -> Iterator[str]:
    """The table of the installed packages, in Markdown."""
    yield "| package | function | verdict | several devices vs. one | reason |"
    yield "|---|---|---|---|---|"
    for case in CASES:
        if version(case.package):
            yield row(case, verdict(case)[0], number_text(difference(case)))


def main() -> None:
    for package, expected in VERSIONS.items():
        found = version(package)
        if found != expected:
            print(
                f"{package}: {f'version {found}' if found else 'not installed'}; the page is about "
                f"{expected}"
            )
    for line in rows():
        print(line, flush=True)


if __name__ == "__main__":
    main()
