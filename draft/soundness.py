"""Abstract interpretation of a traced per-device program: which axes shard which dim of each value. (prototype)"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core


class Unsound(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class Dim:
    axes: tuple[str, ...] = ()
    scrambled: bool = False

    def __str__(self):
        return ("~" if self.scrambled else "") + ("/" + "/".join(self.axes) if self.axes else "·")


WHOLE, UNIFORM = Dim(), None


@dataclasses.dataclass(frozen=True)
class Value:
    dims: tuple[Dim | None, ...]
    partial: frozenset = frozenset()
    extreme: tuple | None = None  # (kind, axes)
    offset: tuple = ()  # ((axis, coefficient), …): the device's value is the sound one plus Σ coefficient · index
    iota: tuple | None = None  # dims along which it counts 0, 1, … in row-major order
    shifted: tuple = ()  # offset of the ids by which it was looked up: right only where they are in range
    found: tuple | None = None  # (kind, offset, size)
    zero: bool = False
    value: int | None = None  # of an integer that is known

    def __str__(self):
        dims = " ".join("*" if d is None else str(d) for d in self.dims)
        marks = "".join(f" +{a}" for a in sorted(self.partial))
        return f"[{dims}]{marks}" + (f" {self.extreme}" if self.extreme else "") + (f" @{self.offset}" if self.offset else "") + (
            f" shifted{self.shifted}" if self.shifted else ""
        ) + (" 0" if self.zero else "")


def plain(dims, **kw) -> Value:
    return Value(tuple(dims), **kw)


def uniform(ndim, **kw) -> Value:
    return Value((UNIFORM,) * ndim, **kw)


def place_of(eqn) -> str:
    tb = eqn.source_info.traceback
    if tb is None:
        return "?"
    lib = jax.__file__.rsplit("/", 1)[0]
    for frame in tb.as_python_traceback() and frames(tb):
        if lib not in frame[0] and "shardlib" not in frame[0]:
            return f"{frame[0].rsplit('/', 1)[-1]}:{frame[1]}"
    return "?"


def frames(tb):
    t, found = tb.as_python_traceback(), []
    while t is not None:
        found.append((t.tb_frame.f_code.co_filename, t.tb_lineno))
        t = t.tb_next
    return found[::-1]


LINEAR = {"neg", "convert_element_type", "copy", "copy_p", "name", "reduce_precision", "optimization_barrier", "stop_gradient",
          "pvary", "reduced_vary_cast_p", "real", "imag", "mul_by_const"}
IDENTITY = {"copy", "name", "reduce_precision", "stop_gradient", "pvary", "reduced_vary_cast_p", "pcast"}
ELEMENTWISE = {
    "add", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "square", "sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "expm1",
    "tanh", "logistic", "sin", "cos", "tan", "erf", "erfc", "erf_inv", "sign", "floor", "ceil", "round", "abs", "neg", "and", "or", "xor", "not",
    "eq", "ne", "lt", "le", "gt", "ge", "select_n", "add_any", "is_finite", "rem", "shift_left", "shift_right_logical",
    "shift_right_arithmetic", "clamp", "convert_element_type", "bitcast_convert_type", "nextafter", "atan2", "cbrt", "population_count",
}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}


class Analysis:
    def __init__(self, sizes: dict[str, int], problems: list | None = None):
        self.sizes, self.problems = sizes, problems
        self.trace: list[tuple] = []

    # ---- helpers

    def devices(self, axes):
        return math.prod(self.sizes[a] for a in axes)

    def strides(self, axes, n):
        """Offset of each device's block of n along a dim sharded over axes."""
        return {a: n * self.devices(axes[i + 1 :]) for i, a in enumerate(axes) if self.sizes[a] > 1}

    def axes_for(self, offset, n):
        """Axes, major first, over which blocks of n have this offset; None if none have."""
        offset = {a: c for a, c in offset if self.sizes[a] > 1}
        order = tuple(sorted(offset, key=lambda a: -offset[a]))
        return order if offset and self.strides(order, n) == offset else None

    def read(self, env, v):
        if isinstance(v, core.Literal):
            val = np.asarray(v.val)
            known = int(val) if val.ndim == 0 and np.issubdtype(val.dtype, np.integer) else None
            return uniform(val.ndim, zero=bool((val == 0).all()) if val.dtype != object else False, value=known)
        return env[v]

    def error(self, eqn, text, ins):
        raise Unsound(f"{place_of(eqn)}: {eqn.primitive.name}: {text}; operands {', '.join(map(str, ins))}")

    def run(self, jaxpr, consts, args):
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            ins = [self.read(env, v) for v in eqn.invars]
            try:
                outs = self.apply(eqn, ins)
                for v, o in zip(eqn.outvars, outs, strict=True):
                    if len(o.dims) != len(v.aval.shape):
                        raise Unsound(f"internal: {eqn.primitive.name} rank {o} {v.aval}")
                    used = [a for d in o.dims if d for a in d.axes]
                    if len(set(used)) < len(used):
                        self.error(eqn, "an axis shards two dims of the result", [o, *ins])
                    if set(used) & o.partial:
                        self.error(eqn, f"result is sharded over an axis over which it is a partial sum: {o}", ins)
            except Unsound as e:
                if self.problems is None:
                    raise
                self.problems.append(str(e))
                outs = [uniform(len(v.aval.shape), zero=True) for v in eqn.outvars]
            env |= dict(zip(eqn.outvars, outs, strict=True))
        return [self.read(env, v) for v in jaxpr.outvars]

    def apply(self, eqn, ins):
        name = eqn.primitive.name
        rule = getattr(self, "r_" + name.replace("-", "_"), None)
        if rule is None and name in IDENTITY:
            return [ins[0]]
        if rule is None and name in ELEMENTWISE:
            return [self.elementwise(eqn, ins)]
        if rule is None:
            inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
            if inner is not None:
                return self.call(inner, ins)
            if all(not v.partial and not v.extreme and not v.offset and all(d in (UNIFORM, WHOLE) for d in v.dims) for v in ins):
                return [plain([WHOLE] * len(v.aval.shape)) for v in eqn.outvars]
            self.error(eqn, "no rule", ins)
        return rule(eqn, ins)

    def call(self, inner, ins):
        if isinstance(inner, core.ClosedJaxpr):
            consts = [uniform(np.ndim(c)) for c in inner.consts]
            return self.run(inner.jaxpr, consts, ins)
        return self.run(inner, [], ins)

    # ---- elementwise

    def join_dim(self, eqn, dims, ins, i):
        found = {d for d in dims if d is not UNIFORM}
        if len(found) > 1:
            self.error(eqn, f"dim {i} is {' and '.join(map(str, found))}", ins)
        return found.pop() if found else UNIFORM

    def sound(self, eqn, v, ins, what="this op"):
        if v.offset:
            self.error(eqn, f"the value depends on the device's index over {', '.join(a for a, _ in v.offset)}", ins)
        if v.shifted:
            self.error(eqn, "entries looked up out of range were not masked", ins)
        return v

    def elementwise(self, eqn, ins):
        name, ndim = eqn.primitive.name, len(eqn.outvars[0].aval.shape)
        ins = [v if len(v.dims) == ndim else uniform(ndim, zero=v.zero, offset=v.offset, value=v.value) for v in ins]
        originals = ins
        offset, iota = (), None
        integer = np.issubdtype(eqn.outvars[0].aval.dtype, np.integer) if eqn.outvars[0].aval.dtype != jax.dtypes.float0 else False
        if name in COMPARE and any(v.offset for v in ins):
            return self.compare(eqn, ins)
        if any(v.offset for v in ins):
            if name in ("add", "sub", "add_any") and integer:
                total = dict(ins[0].offset)
                for a, c in ins[1].offset:
                    total[a] = total.get(a, 0) + (c if name != "sub" else -c)
                offset = tuple(sorted((a, c) for a, c in total.items() if c))
                counts = ins[0].iota if ins[0].iota and all(d is None for d in ins[1].dims) else None
                if name != "sub" and not counts and ins[1].iota and all(d is None for d in ins[0].dims):
                    counts = ins[1].iota
                if counts:
                    shape = eqn.outvars[0].aval.shape
                    axes = self.axes_for(offset, math.prod(shape[i] for i in counts))
                    if axes:
                        dims = [Dim(axes) if i == counts[0] else WHOLE if i in counts else UNIFORM for i in range(ndim)]
                        return plain(dims)
                    iota = counts
                ins = [dataclasses.replace(v, offset=()) for v in ins]
            elif name == "mul" and integer and any(v.value is not None for v in ins):
                c = next(v.value for v in ins if v.value is not None)
                offset = tuple((a, k * c) for v in ins for a, k in v.offset)
                ins = [dataclasses.replace(v, offset=()) for v in ins]
            elif name == "convert_element_type" and integer:
                offset = ins[0].offset
                ins = [dataclasses.replace(v, offset=()) for v in ins]
        elif name in ("add", "mul", "sub", "convert_element_type") and ins[0].iota and all(v.zero for v in ins[1:]):
            iota = ins[0].iota
        for v in ins:
            if not (name == "select_n"):
                self.sound(eqn, v, originals)
        if name == "and" and all(v.found for v in ins):
            a, b = (v.found for v in ins)
            if {a[0], b[0]} == {"ge", "lt"} and a[1] == b[1]:
                size = a[2] if a[0] == "lt" else b[2]
                axes = self.axes_for(tuple((x, -c) for x, c in a[1]), size)
                if axes:
                    dims = [self.join_dim(eqn, [v.dims[i] for v in ins], originals, i) for i in range(ndim)]
                    return plain(dims, found=("in", a[1], size))
        dims = tuple(self.join_dim(eqn, [v.dims[i] for v in ins], originals, i) for i in range(ndim))
        partial = self.partial(eqn, name, ins, originals)
        extreme = self.extremes(eqn, name, ins, originals)
        zero = name in ("mul", "and") and any(v.zero for v in ins) or name in (
            "neg", "convert_element_type", "add", "sub", "add_any", "abs", "square", "sign") and all(v.zero for v in ins)
        found = None
        if name == "select_n":
            return self.select(eqn, ins, dims, partial, originals)
        value = ins[0].value if name == "convert_element_type" and integer else None
        return Value(dims, partial, extreme, offset, iota, zero=zero, found=found, value=value)

    def partial(self, eqn, name, ins, originals):
        parts = [v.partial for v in ins]
        if not any(parts):
            return frozenset()
        if name in ("add", "sub", "add_any"):
            live = {v.partial for v in ins if not v.zero}
            if len(live) > 1:
                self.error(eqn, "a partial sum and another value are added", originals)
            return live.pop() if live else frozenset()
        if name == "mul":
            if sum(bool(p) for p in parts) == 1:
                return frozenset().union(*parts)
        if name == "div" and not parts[1]:
            return parts[0]
        if name in ("neg", "convert_element_type", "reduce_precision"):
            return parts[0]
        if name == "select_n" and not parts[0]:
            live = {v.partial for v in ins[1:] if not v.zero}
            if len(live) == 1:
                return live.pop()
        self.error(eqn, f"of a partial sum over {', '.join(sorted(frozenset().union(*parts)))}", originals)

    def extremes(self, eqn, name, ins, originals):
        found = {v.extreme for v in ins if v.extreme}
        if not found:
            return None
        if name in ("max", "min") and len(found) == 1 and next(iter(found))[0] == name:
            return found.pop()  # max(max over a block, x) is to be combined as well
        if name in ("convert_element_type",):
            return found.pop()
        self.error(eqn, "of a block's maximum", originals)

    def compare(self, eqn, ins):
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        a, b = ins
        total = dict(a.offset)
        for axis, c in b.offset:
            total[axis] = total.get(axis, 0) - c
        offset = tuple(sorted((x, c) for x, c in total.items() if c))
        strip = [dataclasses.replace(v, offset=()) for v in ins]
        ndim = len(shape)
        for v, sign in ((a, 1), (b, -1)):
            if v.iota:
                axes = self.axes_for(tuple((x, sign * c) for x, c in offset), math.prod(shape[i] for i in v.iota))
                if axes:
                    v2 = plain([Dim(axes) if i == v.iota[0] else d for i, d in enumerate(v.dims)])
                    other = strip[1] if v is a else strip[0]
                    dims = tuple(self.join_dim(eqn, [v2.dims[i], other.dims[i]], ins, i) for i in range(ndim))
                    return plain(dims)
        if name in ("ge", "lt") and all(d is None for d in b.dims):
            c = 0 if b.zero else b.value
            if c is not None:
                return plain(strip[0].dims, found=(name, offset, c))
        self.error(eqn, f"compares values that depend on the device's index over {', '.join(x for x, _ in offset)}", ins)

    def select(self, eqn, ins, dims, partial, originals):
        which, *cases = ins
        live = [v for v in cases if not v.zero]
        if which.found and which.found[0] == "in" and len(live) <= 1 and cases[0].zero:
            axes = self.axes_for(tuple((a, -c) for a, c in which.found[1]), which.found[2])
            v = live[0] if live else cases[0]
            if v.shifted and v.shifted != which.found[1]:
                self.error(eqn, "masked by other ids than it was looked up by", originals)
            return Value(dims, partial | frozenset(axes), found=which.found)
        for v in ins:
            self.sound(eqn, v, originals)
        if which.found:
            self.error(eqn, "a mask of this device's own entries", originals)
        return Value(dims, partial, zero=all(v.zero for v in cases))

    def r_optimization_barrier(self, eqn, ins):
        return ins

    # ---- shapes

    def r_broadcast_in_dim(self, eqn, ins):
        (x, *_), shape, to = ins, eqn.params["shape"], eqn.params["broadcast_dimensions"]
        dims = [UNIFORM] * len(shape)
        for i, j in enumerate(to):
            n = eqn.invars[0].aval.shape[i]
            if n == shape[j]:
                dims[j] = x.dims[i]
            elif x.dims[i] and x.dims[i].axes:
                self.error(eqn, f"repeats dim {i}, which is sharded", ins)
        iota = x.iota and tuple(to[i] for i in x.iota)
        if iota and any(shape[j] != eqn.invars[0].aval.shape[i] for i, j in zip(x.iota, iota, strict=True)):
            iota = None
        return [dataclasses.replace(x, dims=tuple(dims), iota=iota)]

    def r_transpose(self, eqn, ins):
        (x,), p = ins, eqn.params["permutation"]
        return [dataclasses.replace(x, dims=tuple(x.dims[i] for i in p), iota=x.iota and tuple(p.index(i) for i in x.iota))]

    def r_squeeze(self, eqn, ins):
        (x,), gone = ins, eqn.params["dimensions"]
        if any(x.dims[i] and x.dims[i].axes for i in gone):
            self.error(eqn, "takes the one entry of a sharded dim", ins)
        keep = [i for i in range(len(x.dims)) if i not in gone]
        iota = x.iota and tuple(keep.index(i) for i in x.iota if i in keep)
        return [dataclasses.replace(x, dims=tuple(x.dims[i] for i in keep), iota=iota or None)]

    def r_expand_dims(self, eqn, ins):
        (x,), new = ins, eqn.params["dimensions"]
        it, old = iter(x.dims), iter(range(len(x.dims)))
        where, dims = {}, []
        for j in range(len(x.dims) + len(new)):
            if j in new:
                dims.append(UNIFORM)
            else:
                where[next(old)] = j
                dims.append(next(it))
        return [dataclasses.replace(x, dims=tuple(dims), iota=x.iota and tuple(where[i] for i in x.iota))]

    def r_reshape(self, eqn, ins):
        (x, *_), a, b = ins, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        dims, iota, i, j = [], [], 0, 0
        counts = x.iota or ()
        while i < len(a) or j < len(b):
            gi, gj = [], []
            pa = pb = 1
            if i < len(a):
                gi.append(i); pa *= a[i]; i += 1
            if j < len(b):
                gj.append(j); pb *= b[j]; j += 1
            while pa != pb:
                if pa < pb:
                    gi.append(i); pa *= a[i]; i += 1
                else:
                    gj.append(j); pb *= b[j]; j += 1
            if pa == 1 and not (gi and gj):
                pass
            states = [(k, x.dims[k]) for k in gi]
            real = [(k, d) for k, d in states if a[k] > 1 or (d and d.axes)]
            cut = [(k, d) for k, d in real if d and d.axes]
            out_real = [k for k in gj if b[k] > 1] or gj[:1]
            if all(d is UNIFORM for _, d in real) :
                new = {k: UNIFORM for k in gj}
            elif not cut:
                new = {k: (WHOLE if k in out_real else UNIFORM) for k in gj}
                if any(d is UNIFORM for _, d in real):
                    pass
            elif len(cut) == 1 and cut[0][0] == real[0][0] and out_real and not cut[0][1].scrambled:
                new = {k: (cut[0][1] if k == out_real[0] else WHOLE if k in out_real else UNIFORM) for k in gj}
            else:
                if len(out_real) > 1:
                    self.error(eqn, "splits a dim whose blocks are scrambled", ins)
                axes = tuple(s for _, d in cut for s in d.axes)
                new = {k: (Dim(axes, True) if k in out_real else UNIFORM) for k in gj}
            dims += [new[k] for k in gj]
            if any(k in counts for k in gi):
                iota += [k for k in gj if b[k] > 1]
        return [dataclasses.replace(x, dims=tuple(dims), iota=tuple(iota) or None)]

    def whole(self, eqn, x, i, ins, what):
        if x.dims[i] is not None and x.dims[i].axes:
            self.error(eqn, f"{what} along dim {i}, which is sharded over {', '.join(x.dims[i].axes)}", ins)

    def r_concatenate(self, eqn, ins):
        k = eqn.params["dimension"]
        for v in ins:
            self.sound(eqn, v, ins)
            self.whole(eqn, v, k, ins, "joins")
        n = len(ins[0].dims)
        dims = [WHOLE if i == k else self.join_dim(eqn, [v.dims[i] for v in ins], ins, i) for i in range(n)]
        return [Value(tuple(dims), self.same_partial(eqn, ins))]

    def same_partial(self, eqn, ins):
        live = {v.partial for v in ins if not v.zero}
        if len(live) > 1:
            self.error(eqn, "partial sums over different axes", ins)
        return live.pop() if live else frozenset()

    def r_split(self, eqn, ins):
        (x,), k = ins, eqn.params["axis"]
        self.whole(eqn, x, k, ins, "splits")
        return [dataclasses.replace(x, iota=None) for _ in eqn.outvars]

    def r_slice(self, eqn, ins):
        (x,) = ins
        for i, (a, b) in enumerate(zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)):
            if a != b:
                self.whole(eqn, x, i, ins, "slices")
        return [dataclasses.replace(x, iota=None)]

    def r_rev(self, eqn, ins):
        for i in eqn.params["dimensions"]:
            self.whole(eqn, ins[0], i, ins, "reverses")
        return [dataclasses.replace(ins[0], iota=None)]

    def r_pad(self, eqn, ins):
        x, fill = ins
        dims = list(x.dims)
        for i, p in enumerate(eqn.params["padding_config"]):
            if any(p):
                self.whole(eqn, x, i, ins, "pads")
                dims[i] = WHOLE
        if x.partial and not fill.zero:
            self.error(eqn, "pads a partial sum", ins)
        return [Value(tuple(dims), x.partial, zero=x.zero and fill.zero)]

    def r_iota(self, eqn, ins):
        k, n = eqn.params["dimension"], len(eqn.params["shape"])
        return [Value(tuple(WHOLE if i == k else UNIFORM for i in range(n)), iota=(k,))]

    def r_axis_index(self, eqn, ins):
        return [Value((), offset=((eqn.params["axis_name"], 1),))]

    # ---- reductions

    def r_reduce_sum(self, eqn, ins):
        (x,), gone = ins, eqn.params["axes"]
        self.sound(eqn, x, ins)
        axes = frozenset(a for i in gone if x.dims[i] for a in x.dims[i].axes)
        if x.extreme:
            self.error(eqn, "sums blocks' maxima", ins)
        return [Value(tuple(d for i, d in enumerate(x.dims) if i not in gone), x.partial | axes, zero=x.zero)]

    def reduce(self, kind):
        def rule(eqn, ins):
            (x,), gone = ins, eqn.params["axes"]
            self.sound(eqn, x, ins)
            if x.partial:
                self.error(eqn, "of a partial sum", ins)
            axes = frozenset(a for i in gone if x.dims[i] for a in x.dims[i].axes)
            old = x.extreme[1] if x.extreme else frozenset()
            axes |= old
            return [Value(tuple(d for i, d in enumerate(x.dims) if i not in gone), extreme=(kind, axes) if axes else None)]

        return rule

    def r_reduce_max(self, eqn, ins):
        return self.reduce("max")(eqn, ins)

    def r_reduce_min(self, eqn, ins):
        return self.reduce("min")(eqn, ins)

    r_reduce_or, r_reduce_and = r_reduce_max, r_reduce_min

    def along(self, eqn, ins):
        k = eqn.params.get("axis", eqn.params.get("dimension"))
        for v in ins:
            self.sound(eqn, v, ins)
            self.whole(eqn, v, k, ins, eqn.primitive.name)
        x = ins[0]
        if x.partial and eqn.primitive.name != "cumsum":
            self.error(eqn, "of a partial sum", ins)
        return [dataclasses.replace(x, dims=tuple(WHOLE if i == k else d for i, d in enumerate(x.dims)), iota=None) for _ in eqn.outvars]

    r_cumsum = r_cummax = r_cummin = r_cumprod = r_cumlogsumexp = along

    def r_sort(self, eqn, ins):
        k = eqn.params["dimension"]
        for v in ins:
            self.sound(eqn, v, ins)
            self.whole(eqn, v, k, ins, "sorts")
            if v.partial:
                self.error(eqn, "of a partial sum", ins)
        n = len(ins[0].dims)
        dims = tuple(WHOLE if i == k else self.join_dim(eqn, [v.dims[i] for v in ins], ins, i) for i in range(n))
        return [plain(dims) for _ in ins]

    def r_argmax(self, eqn, ins):
        (x,) = ins
        for i in eqn.params["axes"]:
            self.whole(eqn, x, i, ins, "argmax")
        return [plain(d for i, d in enumerate(x.dims) if i not in eqn.params["axes"])]

    r_argmin = r_argmax

    def r_dot_general(self, eqn, ins):
        a, b = ins
        for v in ins:
            self.sound(eqn, v, ins)
            if v.extreme:
                self.error(eqn, "of a block's maximum", ins)
        (ca, cb), (ba, bb) = eqn.params["dimension_numbers"]
        if a.partial and b.partial:
            self.error(eqn, "a product of two partial sums", ins)
        partial = a.partial | b.partial
        for i, j in zip(ca, cb, strict=True):
            d = self.join_dim(eqn, [a.dims[i], b.dims[j]], ins, i)
            if d:
                partial |= frozenset(d.axes)
        batch = [self.join_dim(eqn, [a.dims[i], b.dims[j]], ins, i) for i, j in zip(ba, bb, strict=True)]
        free = [d for i, d in enumerate(a.dims) if i not in (*ca, *ba)] + [d for i, d in enumerate(b.dims) if i not in (*cb, *bb)]
        return [Value((*batch, *free), partial, zero=a.zero or b.zero)]

    # ---- lookups

    def r_gather(self, eqn, ins):
        x, ids = ins
        dn, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        shape = eqn.invars[0].aval.shape
        for i, n in enumerate(sizes):
            if n != shape[i] and i not in (*dn.start_index_map, *dn.operand_batching_dims):
                self.whole(eqn, x, i, ins, "slices")
        shifted = ()
        for i in dn.start_index_map:
            if x.dims[i] and x.dims[i].axes:
                axes = self.axes_for(tuple((a, -c) for a, c in ids.offset), shape[i])
                if axes != x.dims[i].axes:
                    self.error(eqn, f"looks up dim {i}, which is sharded, by ids that are not shifted to this device's block", ins)
                shifted = ids.offset
        if ids.offset and not shifted:
            self.sound(eqn, ids, ins)
        batch = list(ids.dims[:-1])
        out, window = [], [d for i, d in enumerate(x.dims) if i not in (*dn.collapsed_slice_dims, *dn.operand_batching_dims)]
        it, wi = iter(batch), iter(window)
        for j in range(len(eqn.outvars[0].aval.shape)):
            out.append(next(wi) if j in dn.offset_dims else next(it))
        return [Value(tuple(out), x.partial | ids.partial, shifted=shifted)]

    def r_scatter_add(self, eqn, ins):
        x, ids, updates = ins
        dn, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
        window = [i for i in range(len(shape)) if i not in (*dn.inserted_window_dims, *dn.operand_batching_dims)]
        dims = list(x.dims)
        partial = updates.partial
        for i, j in zip(window, dn.update_window_dims, strict=True):
            dims[i] = self.join_dim(eqn, [x.dims[i], updates.dims[j]], ins, i)
        batch = [d for j, d in enumerate(updates.dims) if j not in dn.update_window_dims]
        for d, e in zip(batch, ids.dims[:-1], strict=True):
            d = self.join_dim(eqn, [d, e], ins, 0)
            partial |= frozenset(d.axes) if d else frozenset()
        for i in dn.scatter_dims_to_operand_dims:
            if ids.offset:
                axes = self.axes_for(tuple((a, -c) for a, c in ids.offset), shape[i])
                if not axes or not updates.found or updates.found[1] != ids.offset:
                    self.error(eqn, "adds at shifted ids what was not masked by them", ins)
                dims[i] = Dim(axes)
                partial -= frozenset(axes)
            else:
                self.whole(eqn, x, i, ins, "adds")
                dims[i] = WHOLE
        if not x.zero and x.partial != partial:
            self.error(eqn, "adds a partial sum to another value", ins)
        return [Value(tuple(dims), partial)]

    def r_dynamic_slice(self, eqn, ins):
        x, *starts = ins
        dims = list(x.dims)
        for i, (a, b, s) in enumerate(zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, starts, strict=True)):
            if a == b:
                continue
            self.whole(eqn, x, i, ins, "slices")
            if s.offset:
                axes = self.axes_for(s.offset, b)
                if not axes or a != b * self.devices(axes):
                    self.error(eqn, "slices at a place that depends on the device", ins)
                dims[i] = Dim(axes)
        return [dataclasses.replace(x, dims=tuple(dims), iota=None)]

    def r_dynamic_update_slice(self, eqn, ins):
        x, y, *starts = ins
        dims = []
        for i, (a, b, s) in enumerate(zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, starts, strict=True)):
            self.sound(eqn, s, ins)
            if a == b:
                dims.append(self.join_dim(eqn, [x.dims[i], y.dims[i]], ins, i))
            else:
                self.whole(eqn, x, i, ins, "writes a part of")
                self.whole(eqn, y, i, ins, "writes a part of")
                dims.append(WHOLE)
        return [Value(tuple(dims), self.same_partial(eqn, [x, y]))]

    # ---- collectives

    def axes_of(self, eqn):
        axes = eqn.params.get("axis_name", eqn.params.get("axes"))
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        return tuple(a for a in axes if self.sizes[a] > 1)

    def r_all_gather(self, eqn, ins):
        (x,), axes, k = ins, self.axes_of(eqn), eqn.params["all_gather_dimension"]
        self.sound(eqn, x, ins)
        if not eqn.params["tiled"]:
            self.error(eqn, "is not tiled", ins)
        have = x.dims[k].axes if x.dims[k] else ()
        if x.dims[k] is UNIFORM or have[len(have) - len(axes) :] != axes:
            self.error(eqn, f"gathers dim {k} over {', '.join(axes)}, over which it is not sharded last", ins)
        dims = list(x.dims)
        dims[k] = Dim(have[: len(have) - len(axes)])
        return [dataclasses.replace(x, dims=tuple(dims))]

    r_all_gather_reduced = r_all_gather_invariant = r_all_gather

    def r_reduce_scatter(self, eqn, ins):
        (x,), axes, k = ins, self.axes_of(eqn), eqn.params["scatter_dimension"]
        if not set(axes) <= x.partial and not x.zero:
            self.error(eqn, f"sums over {', '.join(axes)}, over which it is no partial sum", ins)
        dims = list(x.dims)
        dims[k] = Dim((*(dims[k].axes if dims[k] else ()), *axes))
        return [dataclasses.replace(x, dims=tuple(dims), partial=x.partial - set(axes))]

    r_unreduced_reduce_scatter = r_reduce_scatter

    def r_psum_invariant(self, eqn, ins):
        axes, outs = self.axes_of(eqn), []
        for x in ins:
            self.sound(eqn, x, ins)
            if not set(axes) <= x.partial and not x.zero:
                self.error(eqn, f"sums over {', '.join(axes)}, over which it is no partial sum", ins)
            outs.append(dataclasses.replace(x, partial=x.partial - set(axes)))
        return outs

    r_psum = r_psum2 = r_unreduced_psum = r_psum_invariant

    def r_pmax(self, eqn, ins):
        axes, outs = frozenset(self.axes_of(eqn)), []
        for x in ins:
            self.sound(eqn, x, ins)
            if x.partial:
                self.error(eqn, "of a partial sum", ins)
            cut = {a for d in x.dims if d for a in d.axes}
            if cut & axes:
                self.error(eqn, "combines different blocks", ins)
            left = (x.extreme[1] - axes) if x.extreme else frozenset()
            if x.extreme and x.extreme[0] != eqn.primitive.name[1:]:
                self.error(eqn, "combines another kind", ins)
            outs.append(dataclasses.replace(x, extreme=(x.extreme[0], left) if left else None))
        return outs

    r_pmin = r_pmax

    def r_vary_unreduced_cast_p(self, eqn, ins):
        (x,), axes = ins, self.axes_of(eqn)
        if not set(axes) <= x.partial and not x.zero:
            self.error(eqn, f"is taken for a partial sum over {', '.join(axes)}, which it is not", ins)
        return [x]

    def r_all_to_all(self, eqn, ins):
        (x,), axes = ins, self.axes_of(eqn)
        s, c = eqn.params["split_axis"], eqn.params["concat_axis"]
        dims = list(x.dims)
        have = dims[c].axes if dims[c] else ()
        if dims[c] is UNIFORM or have[len(have) - len(axes) :] != axes:
            self.error(eqn, "joins a dim that is not sharded last over the axis", ins)
        dims[c] = Dim(have[: len(have) - len(axes)])
        dims[s] = Dim((*(dims[s].axes if dims[s] else ()), *axes))
        return [dataclasses.replace(x, dims=tuple(dims))]

    # ---- control flow

    def join(self, eqn, a, b):
        if a == b:
            return a
        if a.zero and not b.zero or all(d is UNIFORM for d in a.dims) and not a.partial and not b.partial and not b.offset and not a.offset:
            return dataclasses.replace(b, iota=None, found=None)
        if b.zero and not a.zero or all(d is UNIFORM for d in b.dims) and not b.partial and not a.partial and not a.offset and not b.offset:
            return dataclasses.replace(a, iota=None, found=None)
        dims = tuple(self.join_dim(eqn, [x, y], [a, b], i) for i, (x, y) in enumerate(zip(a.dims, b.dims, strict=True)))
        if a.partial != b.partial or a.extreme != b.extreme or a.offset != b.offset:
            self.error(eqn, f"a carried value or branch is once {a}, once {b}", [a, b])
        return Value(dims, a.partial, a.extreme, a.offset, zero=a.zero and b.zero)

    def r_scan(self, eqn, ins):
        nc, nk = eqn.params["num_consts"], eqn.params["num_carry"]
        consts, carry, xs = ins[:nc], ins[nc : nc + nk], ins[nc + nk :]
        for v in xs:
            self.whole(eqn, v, 0, ins, "loops")
        items = [dataclasses.replace(v, dims=v.dims[1:], iota=None) for v in xs]
        body = eqn.params["jaxpr"]
        for _ in range(10):
            outs = self.quiet(body, [*consts, *carry, *items])
            new = [self.join(eqn, a, b) for a, b in zip(carry, outs[:nk], strict=True)]
            if new == carry:
                break
            carry = new
        outs = self.call(body, [*consts, *carry, *items])
        return [*carry, *(dataclasses.replace(v, dims=(WHOLE, *v.dims), iota=None) for v in outs[nk:])]

    def quiet(self, body, ins):
        problems, self.problems = self.problems, None if self.problems is None else []
        try:
            return self.call(body, ins)
        finally:
            self.problems = problems

    def r_while(self, eqn, ins):
        nc, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cc, bc, carry = ins[:nc], ins[nc : nc + nb], ins[nc + nb :]
        for _ in range(10):
            outs = self.quiet(eqn.params["body_jaxpr"], [*bc, *carry])
            new = [self.join(eqn, a, b) for a, b in zip(carry, outs, strict=True)]
            if new == carry:
                break
            carry = new
        (go,) = self.call(eqn.params["cond_jaxpr"], [*cc, *carry])
        self.sound(eqn, go, ins)
        self.call(eqn.params["body_jaxpr"], [*bc, *carry])
        return carry

    def r_cond(self, eqn, ins):
        which, *args = ins
        self.sound(eqn, which, ins)
        if which.partial or which.extreme:
            self.error(eqn, "the predicate is not reduced", ins)
        outs = [self.call(b, args) for b in eqn.params["branches"]]
        result = outs[0]
        for other in outs[1:]:
            result = [self.join(eqn, a, b) for a, b in zip(result, other, strict=True)]
        return result

    def r_custom_vjp_call(self, eqn, ins):
        return self.call(eqn.params["call_jaxpr"], ins)


def spec_dims(spec, ndim):
    entries = [*spec, *([None] * (ndim - len(spec)))]
    return [WHOLE if e is None else Dim((e,) if isinstance(e, str) else tuple(e)) for e in entries]


def check(jaxpr, keep_going=False):
    """Checks each shard_map of a traced program. Returns the problems."""
    problems = [] if keep_going else None
    found = []

    def walk(j):
        for e in j.eqns:
            if e.primitive.name == "shard_map":
                sizes = dict(e.params["mesh"].shape)
                live = lambda dims: [None if d is None else Dim(tuple(a for a in d.axes if sizes[a] > 1)) for d in dims]
                a = Analysis(sizes, problems)
                args = [plain(live(spec_dims(s, len(v.aval.shape)))) for s, v in zip(e.params["in_specs"], e.invars, strict=True)]
                inner = e.params["jaxpr"]
                outs = a.call(inner, args)
                for s, v, o in zip(e.params["out_specs"], e.outvars, outs, strict=True):
                    want = live(spec_dims(s, len(v.aval.shape)))
                    ok = not (o.partial or o.extreme or o.offset) and all(d is None or d == w for d, w in zip(o.dims, want, strict=True))
                    found.append((ok, str(o), [str(w) for w in want]))
            else:
                for v in e.params.values():
                    for x in v if isinstance(v, (tuple, list)) else [v]:
                        x = getattr(x, "jaxpr", x)
                        if hasattr(x, "eqns"):
                            walk(x)

    walk(jaxpr.jaxpr)
    return problems, found
