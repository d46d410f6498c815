"""The training step of train.py, broken in one place at a time: no break that communicates wrongly survives tracing.

Each mutation replaces text of train.py; the step is then traced on a mesh of r=2, d=2, t=2 that has no devices, or on
one of p=2 more. Where train.py changes, a mutation may no longer find its text: mend the text here.
"""

import linecache
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardlib.shardtypes import ShardError
from shardwright.cluster.config import HardwareConfig, MeshConfig
from shardwright.modeling.model import load_model
from shardwright.modeling.settings import ModelConfig
from shardwright.optimizers.config import OptimizerConfig
from shardwright.run.config import Config, PathsConfig, TrainingConfig
from shardwright_data.loader import DataConfig, batch_shapes

pytestmark = pytest.mark.quick

SOURCE = (Path(__file__).parents[2] / "train.py").read_text()
MESH = AbstractMesh((2, 2, 2), ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
STAGES = AbstractMesh((2, 2, 2, 2), ("p", "r", "d", "t"), axis_types=(AxisType.Explicit,) * 4)

GATHER = 'nx = shardops.all_gather("B/r/d L/t M -> B/r/d L M", nx)\n'
SCATTER = 'shardops.psum_scatter("B/r/d L M +t -> B/r/d L/t M", '
MUTATIONS = {  # name: text of train.py, what stands there instead, part of the message
    # weights
    "w_down is not gathered": (
        '>> act["F/t M"]',
        "",
        "operand 2 `F/t M`: the value differs between devices of d",
    ),
    "w_gate is gathered over t too": (
        'w_gate: f32["M/d F/t"] >> act["M F/t"]',
        'w_gate: f32["M/d F/t"] >> act["M F"]',
        "`M F/t` is not the type of bf16[8,12], a copy on each device of r, t, d",
    ),
    "w_up is gathered over t instead": (
        'w_up: f32["M/d F/t"] >> act["M F/t"]',
        'w_up: f32["M/d F/t"] >> act["M/d F"]',
        "`M F/t` is not the type of bf16[4,12], a copy on each device of r, t",
    ),
    "w_o is gathered with the spec of w_q": (
        'w_o: f32["K/t Q D M/d"] >> act["K/t Q D M"]',
        'w_o: f32["K/t Q D M/d"] >> act["M K/t Q D"]',
        "the dims change from `K/t Q D M/d` to `M K/t Q D *d`",
    ),
    "w_k stays sharded over d": (
        'w_k: f32["M/d K/t D"] >> act["M K/t D"]',
        'w_k: f32["M/d K/t D"]',
        "operand 2 `M K/t D`: the value differs between devices of d",
    ),
    "a norm weight is not gathered": (
        'mlp_norm: f32["M/t/d"] >> f32["M"]',
        'mlp_norm: f32["M/t/d"]',
        "rms_norm, argument weight: f32['M']: the value differs between devices of t, d",
    ),
    "a norm weight is gathered over d alone": (
        'mlp_norm: f32["M/t/d"] >> f32["M"]',
        'mlp_norm: f32["M/t/d"] >> f32["M/t"]',
        "rms_norm, argument weight: f32['M']: the value differs between devices of t",
    ),
    "a norm weight is gathered over t first": (
        'mlp_norm: f32["M/t/d"] >> f32["M"]',
        'mlp_norm: f32["M/t/d"] >> f32["M/d"]',
        "another order",
    ),
    "a norm weight multiplies without einsum": (
        'shardops.einsum_unreduced("B/r/d L/t M, M -> B/r/d L/t M", unit_rms(x, epsilon), weight)',
        "(unit_rms(x, epsilon) * weight)",
        "f32[8], a copy on each device of r",
    ),
    "a weight is stored in the other axis order": (
        'final_norm: f32["M/t/d/p"]',
        'final_norm: f32["M/d/t/p"]',
        "dim M/d/t/p has its axes in the wrong order",
    ),
    "a weight is not sharded over d at rest": (
        'w_down: f32["F/t M/d"]',
        'w_down: f32["F/t M"]',
        "layers.w_down: f32['layers F/t M'] is not sharded over d",
    ),
    "the embedding is not gathered": (
        '    embed: f32["V/t/p M/d"] >> act["V/t/p M"]',
        '    embed: f32["V/t/p M/d"]',
        "operand 1 `[V/t] M`: the value differs between devices of d",
    ),
    "replicas are not marked": (
        'shardops.replicate("... -> ... *r", w)',
        "w",
        "the same on every device of r, over which the result varies: its gradient would be all-reduced over r unseen",
    ),
    "replicas are marked over d": (
        'replicate("... -> ... *r", w)',
        'replicate("... -> ... *d", w)',
        "operand 1.embed, f32[10,4] {varying over t, d}, differs between devices of d already",
    ),
    # activations
    "normed positions are not gathered": (
        f"{GATHER}        q = einsum(",
        "q = einsum(",
        "operand 1 `B/r/d L M`: the value differs between devices of t",
    ),
    "normed positions are gathered over d": (
        f"{GATHER}        gate = ",
        GATHER.replace("-> B/r/d L M", "-> B/r L/t M") + "        gate = ",
        "the value differs between devices of t",
    ),
    "each device projects its own positions alone": (
        'einsum("B/r/d L M, M F/t -> B/r/d L F/t", nx, w.w_gate)',
        'einsum("B/r/d L/t M, M F/t -> B/r/d L/t F", x, w.w_gate)',
        "axis t shards both L and F",
    ),
    "attention's output is not reduced": (f"x + {SCATTER}out))", "x + out)", "a partial sum over t"),
    "the MLP's output is not reduced": (
        f"return x + {SCATTER}out)\n",
        "return x + out\n",
        "a partial sum over t",
    ),
    "the MLP returns its partial sum": (
        f"return x + {SCATTER}out)\n",
        "return out\n",
        "layer, result: act['B/r/d L/t M']: the value is a partial sum over t",
    ),
    "the MLP's output is reduced whole": (
        f"return x + {SCATTER}out)\n",
        'return x + shardops.psum("B/r/d L M +t -> B/r/d L M", out)\n',
        "add got incompatible shapes for broadcasting",
    ),
    "the MLP's output is scattered along M": (
        f"return x + {SCATTER}out)\n",
        'return x + shardops.psum_scatter("B/r/d L M +t -> B/r/d L M/t", out)\n',
        "add got incompatible shapes for broadcasting",
    ),
    "the MLP's output is reduced twice": (
        f"return x + {SCATTER}out)\n",
        f'return x + {SCATTER}shardops.psum("B/r/d L M +t -> B/r/d L M", out))\n',
        "is not one: it is reduced already",
    ),
    "the MLP's output is reduced over d": (
        f"return x + {SCATTER}out)\n",
        'return x + shardops.psum_scatter("B/r L M +d -> B/r L/t M", out)\n',
        "the value is a partial sum over t, `B/r L M +d` says +d",
    ),
    "the + of a product is left out": (
        "F/t, F/t M -> B/r/d L M +t",
        "F/t, F/t M -> B/r/d L M",
        "contracting F/t sums only this device's block",
    ),
    "a + is put where nothing is summed": (
        'M, M F/t -> B/r/d L F/t", nx, w.w_gate',
        'M, M F/t -> B/r/d L F +t", nx, w.w_gate',
        "F of the result is F/t in the operands",
    ),
    "a local is annotated as if it were whole": (
        'hidden: act["B/r/d L F/t"]',
        'hidden: act["B/r/d L F"]',
        "layer, local hidden: act['B/r/d L F']: the value differs between devices of t",
    ),
    "the embedded tokens are not reduced": (
        'x = shardops.psum_scatter("B/r/d L M +t +p -> B/r/d L/t M +p", x.astype(act.dtype))',
        "x = x.astype(act.dtype)",
        "operand 1 `B/r/d L/t M`: the value is a partial sum over t",
    ),
    "the lookup takes the table for whole": (
        '"[V/t/p] M, B/r/d L -> B/r/d L M +t +p"',
        '"[V] M, B/r/d L -> B/r/d L M"',
        "operand 1 `[V] M`: the value differs between devices of t",
    ),
    # the loss
    "each device takes its own maximum": (
        'shardops.pmax("B/r/d L V/t/p -> B/r/d L", lax.stop_gradient(logits))',
        "jnp.max(lax.stop_gradient(logits), axis=-1)",
        "cross_entropy, result: f32['B/r/d L']: the value differs between devices of t",
    ),
    "each device normalizes over its own vocabulary": (
        'shardops.psum("B/r/d L +t +p -> B/r/d L", terms)',
        "jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)",
        "cross_entropy, result: f32['B/r/d L']: the value differs between devices of t",
    ),
    "the normalizer's sum is not reduced": (
        'shardops.psum("B/r/d L +t +p -> B/r/d L", terms)',
        "terms",
        "a partial sum over t",
    ),
    "the target's logit is not reduced": (
        'at_target = shardops.psum("B/r/d L +t +p -> B/r/d L", at_target)',
        "pass",
        "a partial sum over t",
    ),
    "the loss stays per device": (
        'shardops.einsum_unreduced("B/r/d L -> +r +d", losses * mask)',
        "jnp.sum(losses * mask)",
        "summed_loss, result: f32['+r +d']: `+r +d` says a partial sum over r, d, but the value is not one",
    ),
    "the loss is reduced over d, not r": (
        'shardops.psum("+r +d ->", loss)',
        'shardops.psum("+r +d -> +r", loss)',
        "a partial sum over r",
    ),
    "the loss is reduced over t too": (
        'shardops.einsum_unreduced("B/r/d L -> +r +d", losses',
        'shardops.einsum_unreduced("B/r/d L -> +r +t +d", losses',
        "the result says +t, but no contracted dim is sharded over it",
    ),
    "the count of targets stays per device": (
        'shardops.psum("+r +d ->", shardops.einsum_unreduced("m B/r/d L -> +r +d", jnp.float32(batch.loss_mask)))',
        "jnp.float32(jnp.sum(batch.loss_mask))",
        "count_targets, result: f32['']: the value differs between devices of r, d",
    ),
    # the step: weights gathered ahead of the microbatches, gradients
    "the gradients are not reduced": (
        "total), reduced(g), layers",
        "total), g, layers",
        "squared_norm, argument x: f32['N/t/d']: the value differs between devices of r",
    ),
    # the optimizer
    "the gradient's norm stays per device": (
        'shardops.psum("+t +d +p ->", functools.reduce(lambda a, b: a + b, squares))',
        "sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(g))",
        "global_norm, result: ",
    ),
    "the gradient's norm is reduced over t alone": (
        '"+t +d +p ->", functools',
        '"+t ->", functools',
        "the value is a partial sum over t, d, `+t` says +t",
    ),
    "the gradient's norm counts r too": (
        '"N/t/d/p -> +t +d +p"',
        '"N/r/t/d/p -> +r +t +d +p"',
        "operand 1 `N/r/t/d`: size mismatch: dim N is ",
    ),
}

MUTATIONS_WITH_STAGES = {  # the same, on a mesh with p
    # weights at rest
    "the layers are not split over p": (
        'layers: Array["layers/p", TransformerLayer]',
        'layers: Array["layers", TransformerLayer]',
        "layers.attention_norm: f32['layers M/t/d'] is not sharded over p",
    ),
    "the embedding is not sharded over p at rest": (
        'embed: f32["V/t/p M/d"]',
        'embed: f32["V/t M/d"]',
        "embed: f32['V/t M/d'] is not sharded over p",
    ),
    "a norm outside of the layers is not sharded over p at rest": (
        'final_norm: f32["M/t/d/p"]',
        'final_norm: f32["M/t/d"]',
        "final_norm: f32['M/t/d'] is not sharded over p",
    ),
    # what the stages are given
    "the lookup takes its part of the vocabulary for that of all stages": (
        '"[V/t/p] M, B/r/d L -> B/r/d L M +t +p"',
        '"[V/t] M, B/r/d L -> B/r/d L M +t"',
        "size mismatch: dim V is ",
    ),
    "the logits are those of one stage": (
        '"B/r/d L M, V/t/p M -> B/r/d L V/t/p", nx, unembed',
        '"B/r/d L M, V/t M -> B/r/d L V/t", nx, unembed',
        "size mismatch: dim V is ",
    ),
    "the loss normalizes over the vocabulary of one stage": (
        'shardops.einsum_unreduced("B/r/d L V/t/p -> B/r/d L +t +p", jnp.exp(',
        'shardops.einsum_unreduced("B/r/d L V/t -> B/r/d L +t", jnp.exp(',
        "size mismatch: dim V is ",
    ),
    "a norm outside of the layers stays sharded over p": (
        'final_norm: f32["M/t/d/p"] >> f32["M"]',
        'final_norm: f32["M/t/d/p"]',
        "rms_norm, argument weight: f32['M']: the value differs between devices of t, d",
    ),
    "the weights are copies over p": (
        'replicate("... -> ... *r", w)',
        'replicate("... -> ... *r *p", w)',
        "operand 1.embed, f32[5,4] {varying over t, d, p}, differs between devices of p already",
    ),
    # within a stage
    "a stage gathers the layers of all stages": (
        "return run_layers(",
        'shardops.all_gather("layers/p M/t/d -> layers M/t/d", w.mlp_norm); return run_layers(',
        "a collective over p inside a pipeline stage: the stages run different tasks at a time, so that it would wait",
    ),
    "a stage sums over p behind the types": (
        '        hidden: act["B/r/d L F/t"] = ',
        '        gate = lax.psum(gate, "p")\n        hidden: act["B/r/d L F/t"] = ',
        "a pipeline stage runs psum_invariant over p: the stages run different tasks at a time",
    ),
    "a stage asks another for its positions": (
        "save_for_backward(attend(q, k, v, self.rule))",
        'save_for_backward(lax.ppermute(attend(q, k, v, self.rule), "p", [(0, 1), (1, 0)]))',
        "a pipeline stage runs ppermute over p",
    ),
    # behind the stages
    "the loss is that of the last stage alone": (
        'return shardops.psum("+p ->", total), reduced(g)',
        "return total, reduced(g)",
        "loss_and_gradients, result[0]: f32['']: the value is a partial sum over p",
    ),
    "the evaluated loss is that of the last stage alone": (
        'return shardops.psum("+p ->", total), count_targets(batch)',
        "return total, count_targets(batch)",
        "the value is a partial sum over p",
    ),
    "the gradient's norm is that of each stage": (
        '"+t +d +p ->", functools',
        '"+t +d ->", functools',
        "the value is a partial sum over t, d, p, `+t +d` says +t +d",
    ),
    "the gradient's norm leaves p out": (
        '"N/t/d/p -> +t +d +p"',
        '"N/t/d -> +t +d"',
        "operand 1 `N/t/d`: the value differs between devices of p",
    ),
}


@pytest.fixture
def trace_step():
    """A function that traces the steps of a module's source on a mesh, and forgets the module."""
    name = "mutated_train"

    def trace(source: str, mesh: AbstractMesh) -> None:
        module = types.ModuleType(name)
        module.__file__ = f"<{name} {hash(source)}>"
        linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
        sys.modules[name] = module
        exec(compile(source, module.__file__, "exec"), vars(module))
        config = Config(
            model=ModelConfig(module=name, vocab=20, d_model=8, layers=2, n_kv=2, n_q_per_kv=3, d_head=6, d_ff=12),
            optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1, schedule_steps=2),
            mesh=MeshConfig(),
            data=DataConfig(filespec="unused"),
            training=TrainingConfig(batch_size=8, seq_len=4, steps=1, microbatches=2),
            hardware=HardwareConfig(),
            paths=PathsConfig(),
        )
        with jax.sharding.use_abstract_mesh(mesh):
            model = load_model(config.model)
            state = jax.eval_shape(lambda: module.init_state(jax.random.key(0), config, model))
            batch = batch_shapes(8, 4, 2)
            module.make_training_step(config, model).eval_shape(state, batch, jax.ShapeDtypeStruct((), jnp.int32))
            module.make_evaluation_step(config, model).eval_shape(state.weights, batch)

    yield trace
    sys.modules.pop(name, None)
    for file in [file for file in linecache.cache if file.startswith(f"<{name} ")]:
        del linecache.cache[file]


@pytest.mark.parametrize("mesh", [MESH, STAGES], ids=["without p", "with p"])
def test_the_step_as_it_stands_traces(trace_step, mesh):
    trace_step(SOURCE, mesh)


@pytest.mark.parametrize("name", [*MUTATIONS, *MUTATIONS_WITH_STAGES])
def test_broken_step_does_not_trace(trace_step, name):
    text, instead, message = (MUTATIONS | MUTATIONS_WITH_STAGES)[name]
    assert text in SOURCE, f"train.py no longer has {text!r}"
    with pytest.raises((ShardError, TypeError, ValueError)) as raised:
        trace_step(SOURCE.replace(text, instead), MESH if name in MUTATIONS else STAGES)
    assert message in str(raised.value)
