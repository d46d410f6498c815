"""Rule of cuDNN's attention, a kernel of which JAX knows only the shapes of the results."""

from shardlib.proof.domain import UNIFORM, Value, whole
from shardlib.proof.equation import Equation, Refused
from shardlib.proof.primitives import Rules

RULES = Rules()
rule = RULES.of

OPERANDS = ("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_k", "page_v")
GIVEN = ("activation", "fwd_output", "grad_output")
"""The further operands of the backward pass: log-sum-exps [B, N, T], the output, and its gradient."""


@rule("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
@rule("dot_product_attention_bwd_wrapper", "dot_product_attention_bwd")
def _attention(eq: Equation) -> list[Value]:
    """Each head of each sequence is by itself: sequences and heads may be sharded, positions and entries may not.

    q, k and v are [B, T, N, H], or [B, N, T, H] with the layout 1; a bias is [B or 1, N or 1, T, S].
    """
    names = (*OPERANDS, *GIVEN)[: len(eq.ins)]
    # Operands that the call leaves out have no entries.
    found = {name: value for i, (name, value) in enumerate(zip(names, eq.ins, strict=True)) if 0 not in eq.shape(i)}
    if others := [name for name in found if name in OPERANDS[4:]]:
        raise Refused(f"cuDNN's attention with {', '.join(others)} has no rule", "say so with shardops.per_device")
    heads_at = 1 if eq.params["layout"] else 2
    place = {name: 1 if name in ("bias", "activation") else heads_at for name in found}
    own = {name: value.dims[place[name]] for name, value in found.items()}
    is_shared = lambda name, i: name == "bias" and eq.shape(3)[i] == 1
    for name, value in found.items():
        eq.plain(value)
        for i in {*range(len(value.dims))} - {0, place[name]}:
            eq.uncut(value, i, "attention runs")
    batch = eq.joined_dim(0, (value.dims[0] for name, value in found.items() if not is_shared(name, 0)))
    counts = [dim for name, dim in own.items() if name not in GIVEN and not is_shared(name, 1)]
    heads = {() if dim is UNIFORM else dim.axes for dim in counts}
    if len(heads) > 1 or any(dim is not UNIFORM and dim.is_merged for dim in own.values()):
        raise Refused("heads of keys are sharded otherwise than those of queries", "shard both over the same axes")
    axes = {*heads.pop(), *(() if batch is UNIFORM else batch.axes)}
    if eq.params["dropout_rate"] and axes:
        raise Refused("each device drops entries by the same seed", "leave dropout to another path of attention")
    of = lambda name: Value((batch, *found[name].dims[1:]))
    if "grad_output" not in found:
        return [of("query"), Value((batch, own["query"], whole(eq.shape()[3 - heads_at])))][: len(eq.eqn.outvars)]
    results = [of("query"), of("key"), of("value")]
    if len(eq.eqn.outvars) > 3:  # of a bias, which sequences and heads may share
        bias = found["bias"]
        results.append(Value(bias.dims, partial=frozenset(axes - bias.sharded)))
    return results
