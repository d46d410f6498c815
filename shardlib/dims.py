"""Says which dims of a primitive's operands and results correspond: one table for every analysis.

The proof uses it to decide along which dims a primitive may be applied to each block, and the
causality check to find which entries depend on which. For a primitive without a row, each entry of
the results may depend on all operands.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardlib.equations import (
    ELEMENTWISE,
    REDUCTIONS,
    SCATTERS,
    Eqn,
    kinds,
    shape_of,
    source_dims,
    words,
)

Labels = list[Any]
"""The label of each dim of an array: an int, a str or None."""


class Dims(NamedTuple):
    """A label for each dim of each operand, and of each result.

    Dims with the same label have the same size, and the primitive treats the entries along them
    separately: a block of the operands gives that block of the results. A label that no result has
    marks a contracted dim: entry i of one operand meets entry i of the others, and the results for
    all i are combined. None on an operand's dim means that its entries are taken together; on a
    result's dim, that each entry may depend on all of these.

    For example, jnp.sum(x, 0) of x: [2, 3] has the operands [[None, 1]] and the results [[1]]. x @
    w of [2, 3] and [3, 4] has [[0, "contracted 0"], ["contracted 0", 1]] and [[0, 1]], sort along
    dim 1 of [2, 3] has [[0, None]] and [[0, None]].
    """

    operands: list[Labels]
    results: list[Labels]


def dims_of(eqn: Eqn) -> Dims:
    """Returns the dims of an equation; all are None for a primitive without a row."""
    return checked(eqn, ROWS.get(eqn.primitive.name, _unknown)(eqn))


def checked(eqn: Eqn, row: Dims) -> Dims:
    """Replaces a label by None if only one dim has it, or dims of different sizes."""
    sizes: dict[Any, list[int]] = {}
    for var, labels in zip((*eqn.invars, *eqn.outvars), (*row.operands, *row.results), strict=True):
        for label, size in zip(labels, shape_of(var), strict=True):
            sizes.setdefault(label, []).append(size)
    kept = {label for label, of_dims in sizes.items() if len(of_dims) > 1 == len({*of_dims})}

    def left(labels: Labels) -> Labels:
        return [label if label in kept else None for label in labels]

    return Dims(list(map(left, row.operands)), list(map(left, row.results)))


def places(result: Labels, labels: Labels) -> list[int | None]:
    """Finds the index in `labels` of each label of `result`; None where a label is not found.

    places([2, 0, None], [0, 1, 2]) is [2, 0, None].
    """
    return [labels.index(x) if x is not None and x in labels else None for x in result]


def _labeled(var: Any, known: Mapping[int, Any]) -> Labels:
    return [known.get(i) for i in range(len(shape_of(var)))]


def _same(eqn: Eqn, kept: Iterable[int]) -> Dims:
    """Gives the dims `kept` the same labels in all operands and results."""
    known = {i: i for i in kept}
    operands, results = ([_labeled(var, known) for var in of] for of in (eqn.invars, eqn.outvars))
    return Dims(operands, results)


def _same_except(eqn: Eqn, *together: int) -> Dims:
    """Gives all dims the same labels in all operands and results, except the dims `together`.

    Negative numbers count from the last dim. `checked` drops the labels of dims whose size changes:
    a part is taken of these, or they hold the parts of one entry.
    """
    rank = max(len(shape_of(var)) for var in eqn.invars)
    return _same(eqn, {*range(rank)} - {i % rank for i in together})


def _of_entries(eqn: Eqn) -> Dims:
    """Labels the dims of elementwise operations; None for dims of size 1 that are broadcast."""
    (shape,) = {*map(shape_of, eqn.outvars)}
    operands: list[Labels] = []
    for var in eqn.invars:
        sizes = zip(shape_of(var), shape, strict=False)
        operands.append([i if n == m else None for i, (n, m) in enumerate(sizes)])
    return Dims(operands, [[*range(len(shape))] for _ in eqn.outvars])


def _unknown(eqn: Eqn) -> Dims:
    return _same(eqn, ())


def _along_axis(eqn: Eqn) -> Dims:
    return _same_except(eqn, eqn.params["axis"])


def _of_matrices(eqn: Eqn) -> Dims:
    return _same_except(eqn, -2, -1)


def _of_windows(eqn: Eqn) -> Dims:
    windows = zip(eqn.params["window_dimensions"], eqn.params["padding"], strict=True)
    return _same(eqn, (i for i, (n, pad) in enumerate(windows) if n == 1 and not any(pad)))


def _of_systems(eqn: Eqn) -> Dims:
    """Labels the dims along which there are separate matrices, or separate right-hand sides."""
    (a, b), _ = _same_except(eqn, -2, -1)
    vectors = len(b) - (1 if eqn.params["left_side"] else 2)
    b[vectors] = vectors
    return Dims([a, b], [b])


def _of_source(eqn: Eqn) -> Dims:
    """Labels dims by the dims of the operand."""
    source = source_dims(eqn)
    known = {i: i for i in source if i is not None}
    return Dims([_labeled(var, known) for var in eqn.invars], [source for _ in eqn.outvars])


def of_reshape(eqn: Eqn) -> Dims:
    """Labels the dims that a reshape keeps: those of the same size and row-major stride.

    A reshape of [6, 4] to [6, 2, 2] keeps the first dim; one to [3, 8] keeps none.
    """
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    order = eqn.params.get("dimensions") or range(len(old))
    known = dict(zip(order, _strides([old[i] for i in order]), strict=True))
    return Dims([_labeled(eqn.invars[0], known)], [_strides(new)])


def _strides(shape: Sequence[int]) -> Labels:
    """Labels each dim by its size and its row-major stride; None for size 1.

    The labels of [6, 1, 4] are "6 of 4", None and "4 of 1".
    """
    found = []
    after = 1
    for size in reversed(shape):
        found.append(f"{size} of {after}" if size != 1 else None)
        after *= size
    return found[::-1]


def _of_pieces(pieces: Sequence, axis: int) -> tuple[list[Labels], list[Labels]]:
    """Labels the dims of `pieces`, and those of the array that stacks them along `axis`."""
    labels: Labels = [*range(len(shape_of(pieces[0])))]
    return [labels] * len(pieces), [[*labels[:axis], None, *labels[axis:]]]


def _of_matmul(eqn: Eqn) -> Dims:
    """Labels batch and free dims by the dims of the result, and contracted dims by names."""
    contracted, batch = eqn.params["dimension_numbers"]
    operands = []
    free = len(batch[0])
    for var, summed, paired in zip(eqn.invars, contracted, batch, strict=True):
        known: dict[int, Any] = {i: k for k, i in enumerate(paired)}
        known |= {i: f"contracted {k}" for k, i in enumerate(summed)}
        for i in range(len(shape_of(var))):
            if i not in known:
                known[i] = free
                free += 1
        operands.append(_labeled(var, known))
    return Dims(operands, [[*range(free)]])


def _of_convolution(eqn: Eqn) -> Dims:
    """Labels the dims of sequences and of channels.

    Channels are contracted, or separate if each is a group. Positions are separate where the kernel
    has size 1.
    """
    p = eqn.params
    (batch, feature, *xs), (out, into, *ws), (to_batch, to_feature, *ys) = p["dimension_numbers"]
    x, kernel = map(shape_of, eqn.invars)
    first: dict[int, Any] = {}
    second: dict[int, Any] = {}
    result: dict[int, Any] = {}
    batches, groups = p["batch_group_count"], p["feature_group_count"]
    if batches == 1:
        first[batch] = result[to_batch] = "sequences"
    elif batches == x[batch] == kernel[out]:  # the gradient of a depthwise kernel
        first[batch] = second[out] = result[to_feature] = "out"
    if groups == 1:
        first[feature] = second[into] = "into"
    if batches == groups == 1:
        second[out] = result[to_feature] = "out"
    elif groups == x[feature] == kernel[out]:
        first[feature] = second[out] = result[to_feature] = "out"
    moves = zip(p["window_strides"], p["padding"], p["lhs_dilation"], strict=True)
    for i, k, j, move in zip(xs, ws, ys, moves, strict=True):
        if kernel[k] == 1 and move == (1, (0, 0), 1):
            first[i] = result[j] = f"positions {i}"
    labels = map(_labeled, (*eqn.invars, *eqn.outvars), (first, second, result))
    return Dims([next(labels), next(labels)], [next(labels)])


def _windows(numbers: Any, var: Any, gone: Sequence[int]) -> list[int]:
    """Returns the dims of `var`, except `gone` and batch dims: those of a gather's windows."""
    gone = (*gone, *numbers.operand_batching_dims)
    return [i for i in range(len(shape_of(var))) if i not in gone]


def _of_gather(eqn: Eqn) -> Dims:
    """Labels dims by the dims of the result; None for dims of which windows hold only a part.

    x[i] of x: [5, 3] and i: [4] has the operands [[None, 1], [0, None]] and the results [[0, 1]].
    The last dim of the indices, which JAX adds, has the components of an index vector.
    """
    x = eqn.invars[0]
    d = eqn.params["dimension_numbers"]
    results = [*range(len(shape_of(eqn.outvars[0])))]
    batch = [i for i in results if i not in d.offset_dims]
    known = dict(zip(_windows(d, x, d.collapsed_slice_dims), d.offset_dims, strict=True))
    pairs = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
    known |= {i: batch[k] for i, k in pairs}
    return Dims([_labeled(x, known), [*batch, None]], [results])


def _of_scatter(eqn: Eqn) -> Dims:
    """Labels dims by the dims of the operand, and dims of the indices by names."""
    x, indices, updates = eqn.invars
    d = eqn.params["dimension_numbers"]
    windows = _windows(d, x, d.inserted_window_dims)
    at: dict[int, Any] = {k: f"indices {k}" for k in range(len(shape_of(indices)) - 1)}
    at |= zip(d.scatter_indices_batching_dims, d.operand_batching_dims, strict=True)
    scattered = (j for j in range(len(shape_of(updates))) if j not in d.update_window_dims)
    new = dict(zip(d.update_window_dims, windows, strict=True))
    new |= {j: at[k] for k, j in enumerate(scattered)}
    kept = _labeled(x, {i: i for i in (*windows, *d.operand_batching_dims)})
    return Dims([kept, _labeled(indices, at), _labeled(updates, new)], [kept])


ROWS: dict[str, Callable[[Any], Dims]] = {
    **dict.fromkeys(ELEMENTWISE, _of_entries),
    **dict.fromkeys(REDUCTIONS, _of_source),
    **dict.fromkeys(SCATTERS, _of_scatter),
    **dict.fromkeys(kinds("running"), _along_axis),
    "approx_top_k": lambda eqn: _same_except(eqn, eqn.params["reduction_dimension"]),
    "conv_general_dilated": _of_convolution,
    "dot_general": _of_matmul,
    "fft": lambda eqn: _same_except(eqn, *range(-len(eqn.params["fft_lengths"]), 0)),
    "gather": _of_gather,
    "iota": _unknown,
    "lu_pivots_to_permutation": lambda eqn: _same_except(eqn, -1),
    "pad": lambda eqn: _same(
        eqn, (i for i, n in enumerate(eqn.params["padding_config"]) if not any(n))
    ),
    "reshape": of_reshape,
    "rev": lambda eqn: _same_except(eqn, *eqn.params["dimensions"]),
    "stack": lambda eqn: Dims(*_of_pieces(eqn.invars, eqn.params["axis"])),
    "triangular_solve": _of_systems,
    "unstack": lambda eqn: Dims(*_of_pieces(eqn.outvars, eqn.params["axis"])[::-1]),
}
"""Functions that label the dims of an equation, by the name of its primitive. A label counts as
None if only one dim has it, or dims of different sizes."""

for _names, _row in (
    ("argmax argmin broadcast_in_dim reduce reduce_xor squeeze transpose", _of_source),
    ("bitcast_convert_type dynamic_slice dynamic_update_slice slice", _same_except),
    ("random_bits random_clone random_seed random_split random_unwrap random_wrap", _same_except),
    ("concatenate sort", lambda eqn: _same_except(eqn, eqn.params["dimension"])),
    ("split top_k", _along_axis),
    ("cholesky eig eigh hessenberg householder_product", _of_matrices),
    ("lu qr schur svd tridiagonal", _of_matrices),
    ("reduce_window reduce_window_max reduce_window_min reduce_window_sum", _of_windows),
    ("select_and_gather_add select_and_scatter select_and_scatter_add", _of_windows),
):
    ROWS |= dict.fromkeys(words(_names), _row)
