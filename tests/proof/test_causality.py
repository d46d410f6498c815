"""Which tokens entries depend on, against numbers: each token is changed, and what changes with it is looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardlib.interpret import interpret
from shardlib.proof.causality import Interpreter, tokens
from shardlib.proof.reach import ordinary, unknown

ROWS, LENGTH, WIDTH = 2, 8, 4
STARTS = np.zeros((ROWS, LENGTH), bool)
STARTS[:, 0] = STARTS[0, 3] = STARTS[1, 6] = True
DOCUMENT = np.cumsum(STARTS, 1)
PLACE = np.arange(LENGTH)
TOKENS = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
EARLIER = PLACE[:, None] >= PLACE
OWN = EARLIER & (DOCUMENT[:, :, None] == DOCUMENT[:, None, :])


def attention(mask, low=-jnp.inf, weights=jax.nn.softmax):
    def attend(x):
        scores = jnp.einsum("blm,bsm->bls", x, jnp.cos(3 * x))
        return jnp.einsum("bls,bsm->blm", weights(jnp.where(mask, scores, low)), x)

    return attend


def added(low):
    def attend(x):
        scores = jnp.einsum("blm,bsm->bls", x, jnp.cos(3 * x)) + jnp.where(OWN, 0.0, low)
        return jnp.einsum("bls,bsm->blm", jax.nn.softmax(scores), x)

    return attend


def linear_attention(x):
    q, k = jnp.sin(x), jnp.cos(x)
    state = jnp.cumsum(k[..., None] * x[:, :, None], axis=1)
    return jnp.einsum("blm,blmn->bln", q, state)


def recurrence(reverse):
    def step(h, x):
        return (0.5 * h + jnp.tanh(x + h), h * x)

    def run(x):
        return lax.scan(step, jnp.zeros((ROWS, WIDTH)), x, reverse=reverse)[1]

    return lambda x: jnp.moveaxis(run(jnp.moveaxis(x, 1, 0)), 0, 1)


def convolution(*pad, dilation=1, depthwise=False):
    w = np.random.default_rng(0).normal(size=(3, 1 if depthwise else WIDTH, WIDTH)).astype(np.float32)
    options = {"rhs_dilation": (dilation,), "dimension_numbers": ("NWC", "WIO", "NWC")}
    options |= {"feature_group_count": WIDTH if depthwise else 1}
    return lambda x: lax.conv_general_dilated(x, jnp.asarray(w), (1,), [pad], **options)


def depths(x):
    """A mixture of depths: the positions of a sequence compete for a layer (arXiv 2404.02258)."""
    _, at = lax.top_k(x[..., 0], LENGTH // 2)
    chosen = jnp.take_along_axis(x, at[..., None], 1)
    return x.at[jnp.arange(ROWS)[:, None], at].add(jnp.tanh(chosen))


def experts(x):
    """A choice of two of three experts by each position."""
    gates, at = lax.top_k(x @ jnp.ones((WIDTH, 3)).at[0, 1].set(3), 2)
    outputs = jnp.stack([jnp.sin((i + 1) * x) for i in range(3)], 2)
    return jnp.sum(jax.nn.softmax(gates)[..., None] * jnp.take_along_axis(outputs, at[..., None], 2), 2)


def solved(x):
    a = jnp.tril(jnp.einsum("blm,bsm->bls", x, x), -1) + jnp.eye(LENGTH)
    return jax.scipy.linalg.solve_triangular(a, x, lower=True)


def fourier(x):
    """A long convolution through a Fourier transform: causal, but which entries it takes is not seen."""
    f = jnp.fft.rfft(x, 2 * LENGTH, axis=1) * jnp.fft.rfft(jnp.exp(-PLACE), 2 * LENGTH)[:, None]
    return jnp.fft.irfft(f, axis=1)[:, :LENGTH]


def until(x):
    """As often as the tokens say."""
    return lax.while_loop(lambda x: jnp.sum(jnp.abs(x)) < 1e3, lambda x: 2 * x + 1, x)


def shifted(x):
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def updated(x):
    return lax.fori_loop(1, LENGTH, lambda i, y: y.at[:, i].add(y[:, i - 1]), x)


def chosen(x):
    return lax.map(lambda row: lax.cond(row[0, 0] > 0, lambda r: r, lambda r: 2 * r, row), x)


def of_blocks(x):
    place = jnp.arange(LENGTH)
    block, within = place // 3, place % 3
    seen = (block[:, None] > block) | ((block[:, None] == block) & (within[:, None] >= within))
    return attention(seen)(x)


def decays(x, order):
    """Differences of a cumsum over all documents, which only depend on what is between."""
    c = jnp.cumsum(jnp.tanh(x[..., 0]), 1)
    late, early = c[:, :, None], c[:, None]
    scores = {"last": x @ x.swapaxes(1, 2) + (late - early), "first": x @ x.swapaxes(1, 2) - early + late}[order]
    return jax.nn.softmax(jnp.where(OWN, scores, -jnp.inf)) @ x


def solved_in_documents(x, **options):
    a = jnp.where(OWN & ~np.eye(LENGTH, dtype=bool), jnp.einsum("blm,bsm->bls", x, x), 0) + jnp.eye(LENGTH)
    if options.get("trans"):
        a = a.swapaxes(1, 2)
    return jax.vmap(lambda a, x: jax.scipy.linalg.solve_triangular(a, x, **options))(a, x)


BEGINS = np.maximum.accumulate(np.where(STARTS, PLACE, 0), 1)
"""Where the document of each position begins."""


def since(form, begins=BEGINS):
    """The sum of a document up to each position: of all positions, less that before the document."""

    def sums(x):
        x = jnp.tanh(x)
        c, at = jnp.cumsum(x, 1), jnp.asarray(begins)[..., None]
        padded = jnp.pad(c, ((0, 0), (1, 0), (0, 0)))
        joined = jnp.concatenate([jnp.zeros_like(c[:, :1]), c], 1)
        before = {
            "less the own term": lambda: jnp.take_along_axis(c - x, at, 1),
            "padded": lambda: jnp.take_along_axis(padded, at, 1),
            "mapped": lambda: jax.vmap(lambda c, at: c[at])(joined, begins),
            "chosen": lambda: jnp.where(at > 0, jnp.take_along_axis(c, jnp.maximum(at - 1, 0), 1), 0),
        }[form]()
        return c - before

    return sums


def with_earlier_blocks(x, less=lambda sums: sums):
    """Running sums within blocks of four, and the sums of the blocks before."""
    blocks = x.reshape(ROWS, -1, 4, WIDTH)
    sums = blocks.sum(2)
    return (jnp.cumsum(blocks, 2) + (jnp.cumsum(sums, 1) - less(sums))[:, :, None]).reshape(x.shape)


def inverse(mask, of=jnp.linalg.inv):
    """The product with the inverse of a triangle, as DeltaNet's WY form has it."""
    return lambda x: of(jnp.eye(LENGTH) + 0.3 * mask * jnp.tanh(x @ x.swapaxes(1, 2))) @ x


def windows(begin, low=3):
    """Sums of four positions of a padded array, from `begin` on."""

    def padded(x):
        return jnp.pad(x, ((0, 0), (low, 0), (0, 0)))

    def of(x):
        return lambda i: lax.dynamic_slice_in_dim(padded(x), begin(i), 4, 1).sum(1)

    return lambda x: jax.vmap(of(x), out_axes=1)(jnp.arange(LENGTH))


def next_of(y):
    return jnp.pad(y[:, 1:], ((0, 0), (0, 1), (0, 0)))


def rest(of=lambda sums: sums, to=lambda low: low):
    """The sum of the own position and the earlier ones: of all, less that of the later ones, which `to` exchanges."""

    def sums(x):
        d = of(jnp.cumsum(jnp.flip(x, 1), 1))
        return d[:, -1:] - to(jnp.flip(jnp.pad(d, ((0, 0), (1, 0), (0, 0)))[:, :LENGTH], 1))

    return sums


def solved_by(solve):
    """What `solve` gives for a triangle and each row."""
    a = (np.eye(LENGTH) + 0.3 * np.tri(LENGTH, k=-1)).astype(np.float32)
    return lambda x: jax.vmap(lambda b: solve(a, b))(x)


def first_step(a, b):
    """One step of a solver, which has not converged."""

    def step(b):
        return jax.scipy.sparse.linalg.bicgstab(lambda v: a @ v, b, maxiter=1)[0]

    return jax.vmap(step, 1, 1)(b)


def first_choices(x, slots=4, rows_of=lambda rows: rows, places_of=lambda place: place):
    """The first choices of a sequence have slots; what is computed of a slot is added where its choice is."""
    place = jnp.sort(jnp.where(x[..., 0] > 0, jnp.arange(LENGTH), LENGTH), axis=1)[:, :slots]

    def of_row(x, place):
        rows = jnp.tanh(x.at[place].get(mode="fill", fill_value=0) @ jnp.ones((WIDTH, WIDTH)))
        rows = rows_of(rows * x.at[place].get(mode="fill", fill_value=0))
        return jnp.zeros_like(x).at[places_of(place)].add(rows, mode="drop")

    return jax.vmap(of_row)(x, place)


STRICT = OWN & ~np.eye(LENGTH, dtype=bool)
"""What a position sees without itself: the first one of a document sees no key."""


def unit(e, least=1e-06):
    return e / (jnp.sum(e, -1, keepdims=True) + least)


def over_peak(s, of=lambda peak: peak):
    return unit(jnp.exp(s - of(jnp.max(s, -1, keepdims=True))))


def rows_without_keys(weights, low=-1e9, how="added", dtype=jnp.float32, mask=STRICT):
    """Attention by STRICT, by a number `low` that is `added` to the scores or `put` in their place, or a function."""

    def attend(x):
        s = jnp.einsum("blm,bsm->bls", x, jnp.cos(3 * x)).astype(dtype)
        ways = {"added": lambda: s + jnp.where(mask, 0.0, low), "put": lambda: jnp.where(mask, s, low)}
        s = how(s) if callable(how) else ways[how]()
        return jnp.einsum("bls,bsm->blm", weights(s).astype(x.dtype), x)

    return attend


def of_compressed_blocks(x):
    """A position sees the means of earlier pairs, and the first ones see none."""
    means = x.reshape(ROWS, -1, 2, WIDTH).mean(2)
    seen = PLACE[:, None] // 2 > np.arange(LENGTH // 2)
    return over_peak(jnp.where(seen, x @ means.swapaxes(1, 2), -1e30)) @ means


def online(s):
    """A softmax over blocks of keys, one after the other."""

    def add(state, s):
        peak, total = state
        new = jnp.maximum(peak, jnp.max(s, -1, keepdims=True))
        return (new, jnp.exp(peak - new) * total + jnp.sum(jnp.exp(s - new), -1, keepdims=True)), None

    blocks = jnp.moveaxis(s.reshape(ROWS, LENGTH, 2, -1), 2, 0)
    start = jnp.full((ROWS, LENGTH, 1), -1e30), jnp.zeros((ROWS, LENGTH, 1))
    peak, total = lax.scan(add, start, blocks)[0]
    return jnp.exp(s - peak) / (total + 1e-6)


def peak_of(s):
    return jnp.max(s, -1, keepdims=True)


PEAKS = {  # of a row, computed in other ways, or by something in between
    "minimum": lambda s: jnp.minimum(peak_of(s), 10.0),
    "integers": lambda s: jnp.float32(jnp.int32(peak_of(s))),
    "cummax": lambda s: lax.cummax(s, 2),
    "sort": lambda s: jnp.sort(s, -1)[..., -1:],
    "argmax": lambda s: jnp.take_along_axis(s, jnp.argmax(s, -1, keepdims=True), -1),
    "negatives": lambda s: -jnp.min(-s, -1, keepdims=True),
    "logsumexp": lambda s: jax.nn.logsumexp(s, -1, keepdims=True),
    "chosen": lambda s: jnp.where(peak_of(s) > 1e3, 0.0, peak_of(s)),
}
softmax, added_low = jax.nn.softmax, lambda mask, low=-1e9: jnp.where(mask, 0.0, low)
without = rows_without_keys
LEAKS = {  # rows without keys: their largest score is itself a number that masks, so that later tokens count
    **{f"peak: {name}": without(lambda s, of=of: unit(jnp.exp(s - of(s)))) for name, of in PEAKS.items()},
    "over a sum": without(over_peak),
    "softmax": without(softmax),
    "GPT-2's number": without(over_peak, -1e4),
    "softmax, -1e30": without(softmax, -1e30, "put"),
    "softmax, -1e9 in bf16": without(softmax, -1e9, "put", jnp.bfloat16),
    "-1e4 in f16": without(over_peak, -1e4, dtype=jnp.float16),
    "two numbers": without(over_peak, how=lambda s: jnp.where(STRICT, s, -1e9) + added_low(STRICT, -1e8)),
    "by products": without(over_peak, how=lambda s: s * STRICT - 1e10 * (1 - STRICT) - s),
    "log_softmax": without(lambda s: jnp.exp(jax.nn.log_softmax(s))),
    "online": without(online),
    "nan_to_num": without(lambda s: jnp.nan_to_num(softmax(s))),
    "maximum of the sum": without(
        lambda s: (e := jnp.exp(s - peak_of(s))) / jnp.maximum(e.sum(-1, keepdims=True), 1e-6)
    ),
    "softmax1": without(lambda s: unit(jnp.exp(s - peak_of(s)), 1.0)),
    "sigmoid": without(lambda s: jax.nn.sigmoid(s - jnp.min(s, -1, keepdims=True))),
    "relu": without(lambda s: unit(jax.nn.relu(s - peak_of(s) + 2))),
    "over the largest size": without(lambda s: unit(jnp.exp(s / peak_of(jnp.abs(s))))),
    "chosen by tokens": without(over_peak, how=lambda s: jnp.where(STRICT & (s > 0), s, -1e9)),
    "compressed blocks": of_compressed_blocks,
}  # fmt: skip


def own(weights, *options):
    return without(weights, *options, mask=OWN)


def finite(peak):
    return jnp.where(jnp.isfinite(peak), peak, 0)


def own_or(s):
    return OWN & ((s > 0) | np.eye(LENGTH, dtype=bool))


RIGHT = {  # that leave out what may come from rows without keys, or have none
    "-1e30, weights set to 0": without(lambda s: softmax(s) * STRICT, -1e30, "put"),
    "added, weights set to 0": without(lambda s: softmax(s) * STRICT),
    "a peak of at least 0": without(lambda s: over_peak(s, lambda peak: jnp.maximum(peak, 0.0))),
    "a finite peak": without(lambda s: over_peak(s, finite), -jnp.inf, "put"),
    "no peak": without(lambda s: unit(jnp.exp(s))),
    "-1e30 in bf16": own(softmax, -1e30, "put", jnp.bfloat16),
    "with a slope": without(softmax, how=lambda s: s + 0.5 * (PLACE - PLACE[:, None]) + added_low(OWN)),
    "chosen by tokens, and its own": without(softmax, how=lambda s: jnp.where(own_or(s), s, -1e9)),
    "chosen by tokens, -inf": without(
        lambda s: over_peak(s, lambda peak: jnp.maximum(peak, -9.0)),
        how=lambda s: jnp.where(OWN & (s > 0), s, -jnp.inf),
    ),
    "online": own(online),
    "logsumexp": own(lambda s: jnp.exp(s - PEAKS["logsumexp"](s))),
    "nan_to_num in two layers": lambda x: own(softmax)(own(lambda s: jnp.nan_to_num(softmax(s)))(x)),
    "at least the lowest number": own(lambda s: softmax(jnp.maximum(s, jnp.finfo(jnp.float32).min))),
}  # fmt: skip


def of_each(function):
    return jax.vmap(jax.vmap(function))


def feature_of(row):
    return jnp.int32(jnp.abs(row[0]) * 9) % WIDTH


def bits_of(row):
    return lax.bitcast_convert_type(row[0], jnp.int32)


EXACT = {
    "entry by entry": lambda x: jnp.tanh(x) * x + jax.nn.softmax(x),
    "of no entries": lambda x: x + jnp.sum(x[:0, :2, :1].reshape(0, 2)),
    "of the document": attention(OWN),
    "by a large number": attention(OWN, -1e9),
    "by an added number": added(-1e9),
    "by log 0": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2) + jnp.log(jnp.tri(LENGTH))) @ x,
    "by products": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2) * OWN - 1e10 * (1 - OWN)) @ x,
    "sigmoids": attention(OWN, -1e9, jax.nn.sigmoid),
    "weights set to 0": attention(True, 0, lambda s: s * OWN),
    "of jax.nn": lambda x: jax.nn.dot_product_attention(*[x[:, :, None]] * 3, is_causal=True)[:, :, 0],
    "linear attention": linear_attention,
    "cumsum from the end": lambda x: lax.cumsum(x, 1, reverse=True),
    "associative scan": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "recurrence": recurrence(False),
    "backward recurrence": recurrence(True),
    "convolution": convolution(2, 0),
    "dilated convolution": convolution(4, 0, dilation=2),
    "next": lambda x: jnp.roll(x, -1, 1),
    "shift in the document": lambda x: jnp.where(jnp.asarray(STARTS)[..., None], 0, shifted(x)),
    "updated": lambda x: lax.dynamic_update_slice(jnp.zeros_like(x), x[:, 2:], (0, 1, 0)),
    "loop": updated,
    "norm over B": lambda x: x / jnp.sqrt(jnp.mean(x * x, axis=(0, 1))),
    "experts": experts,
    "triangle": solved,
    "triangle in documents": lambda x: solved_in_documents(x, lower=True),
    "transposed triangle": lambda x: solved_in_documents(x, lower=False, trans=1),
    "blocks": of_blocks,
    "decays": lambda x: decays(x, "last"),
    "shifted out": lambda x: jnp.pad(x[:, :-LENGTH], ((0, 0), (LENGTH, 0), (0, 0))) + jnp.cumsum(x, 1),
    "known indices, added": lambda x: jnp.zeros_like(x).at[:, np.array([1, 2, 2, 4, 5, 7, 7, 7])].add(x),
    "even and odd": lambda x: jnp.stack([x[:, ::2], -x[:, ::2]], 2).reshape(x.shape),
    "merged dims": lambda x: jnp.cumsum(x.reshape(-1, WIDTH), 0).reshape(x.shape),
    **{f"sum of the document, {form}": since(form) for form in ("less the own term", "padded", "chosen")},
    "sum from the second position of the document": since("padded", np.minimum(BEGINS + 1, PLACE)),
    "sum to another document": since("mapped", BEGINS[::-1].copy()),
    "sums of earlier blocks": with_earlier_blocks,
    "sums of the block and earlier ones": lambda x: with_earlier_blocks(x, lambda _: 0),
    "inverse": inverse(np.tri(LENGTH, k=-1)),
    "transpose of the inverse": inverse(np.tri(LENGTH, k=-1), lambda a: jnp.linalg.inv(a).swapaxes(1, 2)),
    "solved": lambda x: inverse(STRICT, lambda a: jnp.linalg.solve(a, x) @ jnp.ones((WIDTH, LENGTH)))(x * 0 + 1),
    "windows of a padded array": windows(lambda i: i),
    "windows moved back into the array": windows(lambda i: i, 0),
    "fft of a position": lambda x: jnp.fft.rfft(x, 2 * WIDTH).real[..., :WIDTH],
    "pool of a position": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2), (1, 1, 1), "SAME"),
    "reduced by a function": lambda x: (x + lax.reduce(x, 1.0, lambda a, b: a * (b + 1), (2,))[..., None]),
    "a matrix of each position": of_each(lambda row: jnp.linalg.qr(jnp.outer(row, row) + jnp.eye(WIDTH))[1][0]),
    "written where the token says": of_each(lambda row: row.at[feature_of(row)].set(9.0)),
    "noise by the token": of_each(lambda row: jax.random.normal(jax.random.key(bits_of(row)), (WIDTH,))),
    "transposed by a reshape": lambda x: lax.reshape(x, (LENGTH, ROWS, WIDTH), (1, 0, 2)).swapaxes(0, 1),
}  # fmt: skip
WIDER = {  # whose entries may depend on more than they do: on values that tokens choose
    "sums cut to integers, less their last": lambda x: next_of(jnp.cumsum(3 * x, 1).astype(int).astype(float) - 3 * x),
    "less the later, of another feature": rest(to=lambda low: jnp.flip(low, -1)),
    "less the later, cut to integers": rest(of=lambda sums: (3 * sums).astype(int)),
    "less the later, rounded": rest(of=lambda sums: lax.reduce_precision(sums, 8, 2)),
    "solved as if it were symmetric": solved_by(lambda a, b: jax.scipy.linalg.solve(a, b, lower=True, assume_a="pos")),
    "solved in one step": solved_by(first_step),
    "sums of blocks, less twice their own": lambda x: with_earlier_blocks(x, lambda sums: 2 * sums),
    "inverse of no triangle": inverse(np.tri(LENGTH, k=1)),
    "largest score": lambda x: jnp.max(x @ x.swapaxes(1, 2) + jnp.where(OWN, 0, -1e9), 2, keepdims=True) + 0 * x,
    "sort": lambda x: jnp.sort(x, 1),
    "mixture of depths": depths,
    "fourier": fourier,
    "own branch": chosen,
    "until": until,
    "positions of tokens": lambda x: jnp.take_along_axis(x, jnp.int32(jnp.abs(x[..., :1])) % LENGTH, 1),
}


def reach(f):
    """First and last token that each position of f(x) may depend on, where row i of x is token i."""
    program = jax.make_jaxpr(f)(jnp.zeros((ROWS, LENGTH, WIDTH)))
    found = []
    for is_forward in (False, True):
        number = tokens(ROWS, LENGTH, is_forward)
        x = unknown((ROWS, LENGTH, WIDTH), np.dtype(float), number[..., None])
        (y,) = interpret(program, Interpreter(number, is_forward=is_forward), [ordinary(x)])
        found.append(np.broadcast_to(y.last, y.shape).max(-1))
    return np.where(found[0] < 0, 2**30, number.size - 1 - found[0]), found[1]


def measured_of_all(functions):
    """The same of each function by numbers: what changes with a token, at any of several texts."""
    found = {name: (np.full((ROWS, LENGTH), 2**30), np.full((ROWS, LENGTH), -1)) for name in functions}
    run = jax.jit(lambda x: {name: jax.vmap(f)(x) for name, f in functions.items()})
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
        after = np.repeat(x[None], ROWS * LENGTH, 0).reshape(-1, ROWS * LENGTH, WIDTH)
        token = np.arange(ROWS * LENGTH)
        after[token, token] = np.random.default_rng(seed + 9).normal(size=(ROWS * LENGTH, WIDTH))
        outs = run(np.concatenate([x[None], after.reshape(-1, *x.shape)]))
        number = token[:, None, None]
        for name, out in jax.tree.map(np.asarray, outs).items():
            moved = (np.abs(out[1:] - out[0]) > 1e-6 * np.abs(out[0]).max()).any(-1)
            first, last = found[name]
            np.minimum(first, np.where(moved, number, 2**30).min(0), out=first)
            np.maximum(last, np.where(moved, number, -1).max(0), out=last)
    return found


def measured(f):
    return measured_of_all({"": f})[""]


TABLES = {"EXACT": EXACT, "WIDER": WIDER, "LEAKS": LEAKS, "RIGHT": RIGHT}


@pytest.fixture(scope="module")
def by_numbers():
    """What measured gives for each function of the tables, which are compiled as one program."""
    return measured_of_all({f"{table} {name}": f for table, of in TABLES.items() for name, f in of.items()})


@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_those_that_change_an_entry(name, by_numbers):
    (first, last), (least, most) = reach(EXACT[name]), by_numbers[f"EXACT {name}"]
    np.testing.assert_array_equal(first, least)
    np.testing.assert_array_equal(last, most)


@pytest.mark.parametrize("name", WIDER)
def test_tokens_that_change_an_entry_are_among_those_found(name, by_numbers):
    (first, last), (least, most) = reach(WIDER[name]), by_numbers[f"WIDER {name}"]
    assert ((first <= least) & (last >= most)).all(), (first, least, last, most)


@pytest.mark.parametrize("name", LEAKS)
def test_rows_that_see_no_key_may_read_all_tokens(name, by_numbers):
    (first, last), (least, most) = reach(LEAKS[name]), by_numbers[f"LEAKS {name}"]
    assert (most > TOKENS).any()
    assert (last >= most).all()
    assert (first <= least).all()


@pytest.mark.parametrize("name", RIGHT)
def test_rows_that_see_no_key_may_be_left_out(name, by_numbers):
    (first, last), (least, most) = reach(RIGHT[name]), by_numbers[f"RIGHT {name}"]
    begin = TOKENS - PLACE + np.maximum.accumulate(np.where(STARTS, PLACE, 0), 1)
    assert (most <= TOKENS).all()
    assert (last <= TOKENS).all()
    assert (first >= begin).all()
    assert (last >= most).all()
    assert (first <= least).all()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_what_changes_an_entry_of_functions_of_functions_is_among_its_tokens(seed):
    functions = list((EXACT | WIDER).values())
    f, g, h = (functions[i] for i in np.random.default_rng(seed).integers(len(functions), size=3))

    def both(x):
        return h(jnp.tanh(f(x)) + jnp.tanh(g(x)))

    (first, last), (least, most) = reach(both), measured(both)
    assert ((first <= least) & (last >= most)).all(), (first, least, last, most)


def test_slots_of_the_first_choices_know_no_later_ones():
    (_, last), (_, most) = reach(first_choices), measured(first_choices)
    np.testing.assert_array_equal(last, TOKENS)
    assert (last >= most).all()


OTHER_SLOTS = {  # what is added where the choice of another slot is
    "the next": {"rows_of": lambda rows: rows[1:], "places_of": lambda place: place[:-1]},
    "the last": {"rows_of": lambda rows: rows[::-1]},
    "rolled": {"rows_of": lambda rows: jnp.roll(rows, -1, 0)},
}


@pytest.mark.parametrize("name", OTHER_SLOTS)
def test_slots_are_those_of_their_own_choices(name):
    def f(x):
        return first_choices(x, **OTHER_SLOTS[name])

    (_, last), (_, most) = reach(f), measured(f)
    assert (most > TOKENS).any()
    assert (last >= most).all()


def first_rows(moved):
    """Adds the sum of the first two chosen rows, after they were `moved`, to later positions."""

    def of_sequence(x):
        place = jnp.sort(jnp.where(x[:, 0] > 0, PLACE, LENGTH))[:2]
        rows = moved(x.at[place].get(mode="fill", fill_value=0))
        return jnp.where((PLACE >= 2)[:, None], x + rows.sum(0, keepdims=True)[..., :WIDTH], x)

    return lambda x: jnp.stack([of_sequence(row) for row in x])


MOVED = {  # in which each choice of a slot would have to be moved
    "padded": lambda rows: jnp.pad(rows, ((0, 0), (0, 1))),
    "convolved": lambda rows: lax.conv_general_dilated(
        rows[None], jnp.ones((1, WIDTH, WIDTH)), (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )[0],
    "written": lambda rows: lax.dynamic_update_slice(rows, jnp.ones((1, WIDTH)), (1, 0)),
    "running sums": lambda rows: jnp.cumsum(rows, 1),
    "solved": lambda rows: jnp.linalg.solve(jnp.eye(WIDTH) * 2, rows.T).T,
}


@pytest.mark.parametrize("name", MOVED)
def test_slots_that_are_not_followed_know_all_choices(name):
    f = first_rows(MOVED[name])
    (_, last), (_, most) = reach(f), measured(f)
    assert (most > TOKENS).any()
    assert (last >= most).all()


@pytest.mark.parametrize("adds", [True, False])
def test_rows_added_outside_of_an_array_come_to_its_end_if_they_are_clipped(adds):
    at = np.where(PLACE == LENGTH - 1, -5 * LENGTH, PLACE)

    def f(x):
        zeros = jnp.zeros_like(x).at[:, at]
        return zeros.add(x, mode="clip") if adds else zeros.subtract(x, mode="clip")

    (_, last), (_, most) = reach(f), measured(f)
    assert most[0, 0] == LENGTH - 1
    assert (last >= most).all()


def selects(of_mask=lambda at, pos, x: pos, how=None, gate=lambda scores, x: scores, flat=False):
    """Attention to earlier blocks of two that a top_k chooses, whose rows are gathered.

    `of_mask` are the positions by which they are masked; `how`, if given, uses the choice instead.
    """
    block = PLACE // 2

    def f(x):
        scores = jnp.einsum("blm,bnm->bln", x, jnp.cos(3 * x.reshape(ROWS, -1, 2, WIDTH).mean(2)))
        _, at = lax.top_k(gate(jnp.where(block[:, None] > np.arange(LENGTH // 2), scores, -jnp.inf), x), 2)
        if how is not None:
            return x + how(at)[..., None]
        pos = at[..., None] * 2 + jnp.array([1, 0])
        pos, masked = (a.reshape(ROWS, LENGTH, 4) if flat else a for a in (pos, of_mask(at, pos, x)))
        rows = jax.vmap(lambda x, pos: x[pos])(x, pos)
        seen = masked // 2 < block.reshape(-1, *[1] * (pos.ndim - 2))
        axes = "st"[: pos.ndim - 2]
        weights = jnp.where(seen, jnp.exp(jnp.einsum(f"blm,bl{axes}m->bl{axes}", jnp.sin(x), jnp.sin(rows))), 0)
        return x + jnp.einsum(f"bl{axes},bl{axes}m->blm", weights, rows)

    return f


def of_all(scores, x):
    """Scores that later tokens may change."""
    finite = jnp.where(jnp.isfinite(scores), scores, 0)
    return finite + jnp.cos(3 * jnp.sum(finite, 1, keepdims=True) * (1 + jnp.arange(LENGTH // 2)))


def of_token(scores, x):
    """Scores by which a position may choose any block."""
    return x


@pytest.mark.parametrize("gate", [lambda scores, x: scores, of_token])
@pytest.mark.parametrize("flat", [False, True])
def test_rows_that_a_top_k_selects_are_masked_by_its_indices(flat, gate):
    f = selects(flat=flat, gate=gate)
    (first, last), (least, most) = reach(f), measured(f)
    np.testing.assert_array_equal(last, TOKENS)
    assert ((first <= least) & (last >= most)).all()


SELECTED = {
    "without a mask": {"of_mask": lambda at, pos, x: 0 * pos},
    "by the mask of another slot": {"of_mask": lambda at, pos, x: pos[:, :, ::-1]},
    "by the mask of the next position": {"of_mask": lambda at, pos, x: jnp.roll(pos, -1, 1)},
    "by the mask of another choice": {"of_mask": lambda at, pos, x: selects_last(x)[..., None] * 2 + jnp.arange(2)},
    "by a mask in another order": {  # which is that of the rows if choices are counted as they come
        "of_mask": lambda at, pos, x: jnp.array([[0], [4]]) + at[:, :, None], "flat": True, "gate": of_token,
    },
    "by later scores": {"gate": of_all},
    "the largest index": {"how": lambda at: jnp.max(at, -1), "gate": of_all},
    "whether one is the first": {"how": lambda at: jnp.any(at == 0, -1), "gate": of_all},
    "how many are even": {"how": lambda at: jnp.sum(at % 2, -1), "gate": of_all},
}  # fmt: skip


def selects_last(x):
    return lax.top_k(-x, 2)[1]


@pytest.mark.parametrize("name", SELECTED)
def test_rows_that_are_selected_otherwise_know_later_tokens(name):
    f = selects(**{"gate": of_token} | SELECTED[name])
    (first, last), (least, most) = reach(f), measured(f)
    assert (most > TOKENS).any()
    assert ((first <= least) & (last >= most)).all()


def of_pairs(turned):
    """Of pairs of positions: the rows that one chooses, masked by the choice of the first or the second."""

    def f(x):
        _, at = lax.top_k(x, 2)
        rows = jax.vmap(lambda x, pos: x[pos])(x, 2 * at)
        seen = 2 * at < PLACE[:, None]
        seen = jnp.broadcast_to(seen[:, None] if turned else seen[:, :, None], (ROWS, LENGTH, LENGTH, 2))
        return x + jnp.einsum("blnc,blcm->blm", jnp.where(seen[:, :, :5], 1.0, 0.0), rows)

    return f


def of_neighbors(x):
    """Rows that a position chooses, masked by the choice of the next one."""
    _, at = lax.top_k(x, 2)
    rows = jax.vmap(lambda x, pos: x[pos])(x, 2 * at[:, :-1])
    seen = 2 * at[:, 1:] < PLACE[:-1, None]
    return x + jnp.pad(jnp.where(seen[..., None], rows, 0).sum(2), ((0, 0), (0, 1), (0, 0)))


def test_rows_are_masked_by_the_choice_of_their_own_position():
    (_, last), (_, most) = reach(of_pairs(False)), measured(of_pairs(False))
    np.testing.assert_array_equal(last, TOKENS)
    assert (last >= most).all()
    for f in (of_pairs(True), of_neighbors):
        (_, last), (_, most) = reach(f), measured(f)
        assert (most > TOKENS).any()
        assert (last >= most).all()
