"""Runs a traced program in exact arithmetic, on all devices of a mesh at once.

`Machine` goes through the equations of a jaxpr in order. Each primitive has a rule: in a table of
shardlib.exact.elementwise, or a function that `rule` registers. A primitive without one raises
Undecided; nothing is guessed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardlib import equations
from shardlib.equations import called
from shardlib.exact import elementwise, ring
from shardlib.exact.endings import Undecided, Wrong
from shardlib.exact.references import kernel_of, reference_of
from shardlib.exact.values import Exact, Ref, is_complex, is_float, is_key, join, move
from shardlib.interpret import Operation, steps
from shardlib.tracing import without_mesh

Rule = Callable[..., Any]
"""Gets a Machine, an equation and its operands; returns the result, or a list of results."""
RULES: dict[str, Rule] = {}
"""Rules by primitive."""
Observer = Callable[["Machine", Operation, list, list], None]
"""Gets each equation that was run, its operands, and a list of its results, which it may change."""
UNCHANGED = equations.IDENTITIES | equations.kinds("unreduced")
UNCHANGED |= {"copy", "copy_p", "device_put", "mesh_cast", "random_clone", "reduce_precision"}
"""Primitives that return their operands. A partial sum is what each device has of it."""
DECISIONS = equations.words("ge gt le lt max min")
"""Decisions between two numbers, which a machine can reverse."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class Machine:
    """Runs programs on all devices of a mesh.

    Attributes:
        sizes: number of devices along each axis.
        rank: number of axes, which is that of leading dims of all values.
        parted: axes along which the devices took different branches, while these run, each with
            the `cond` or `while` that decides.
        problems: what is wrong with results of shard_maps, each with its place.
    """

    def __init__(
        self, sizes: dict[str, int], observe: Observer | None = None, is_reversed: bool = False
    ):
        """Takes sizes of axes, an observer, and whether decisions by one float are reversed.

        Two programs that decide alike still do when they are reversed. So a branch can be compared
        that no input takes, such as that of gradients larger than a limit.
        """
        self.sizes = dict(sizes)
        self.rank = len(self.sizes)
        self.parted: dict[str, str] = {}
        self.problems: list[str] = []
        self._index = {axis: i for i, axis in enumerate(self.sizes)}
        self._observe = observe
        self._is_reversed = is_reversed
        self._operation: Operation | None = None
        self._literals: dict[int, tuple[Any, Exact]] = {}

    # ---- values

    def whole(self, array: Any) -> Exact:
        """Returns an array that is the same on all devices."""
        if is_key(getattr(array, "dtype", np.float32)):
            return Exact(self._on_all(encode_keys(array)))
        array = self._on_all(np.asarray(array))
        if is_float(array.dtype):
            array = array.astype(np.float64)
            return Exact(array, ring.image_of(array))
        if array.dtype.kind == "c":
            array = array.astype(np.complex128)
            return Exact(array, ring.pack(ring.image_of(array.real), ring.image_of(array.imag)))
        return Exact(array)

    def _on_all(self, array: np.ndarray) -> np.ndarray:
        return array.reshape((1,) * self.rank + array.shape)

    def _constant(self, x: Any) -> Any:
        """Returns a literal, or an array that a jaxpr holds."""
        if hasattr(x, "val"):
            return self._literal(x)
        return x if isinstance(x, Exact | Ref) else self.whole(x)

    def _literal(self, var: Any) -> Exact:
        found = self._literals.get(id(var))
        if found is None:
            value = self.whole(np.asarray(var.val).astype(var.aval.dtype))
            if is_float(var.aval.dtype) and var.aval.shape == ():
                image = ring.image_of_literal(float(value.value.flat[0]), np.dtype(var.aval.dtype))
                value = Exact(value.value, np.full_like(value.image, image))
            found = self._literals[id(var)] = (var, value)
        return found[1]

    def leading(self, xs: Sequence[Exact]) -> tuple[int, ...]:
        """Returns the leading dims that results of these operands have."""
        return np.broadcast_shapes(*(x.value.shape[: self.rank] for x in xs))

    def spread(self, x: Exact, leading: tuple[int, ...]) -> Exact:
        """Returns an array with these leading dims."""
        return move(lambda a: np.broadcast_to(a, leading + a.shape[self.rank :]), x)

    def shape(self, x: Exact) -> tuple[int, ...]:
        """Returns the shape of an array on one device."""
        return x.value.shape[self.rank :]

    def lift(self, x: Exact, rank: int) -> Exact:
        """Returns a scalar as an array of one entry that has this many dims."""
        if x.value.ndim == self.rank and rank:
            return move(lambda a: a.reshape(a.shape + (1,) * rank), x)
        return x

    def on_each_device(self, function: Callable, xs: Sequence[Exact]) -> Any:
        """Applies a function of the arrays of one device, which may call JAX, on each device."""
        leading = self.leading(xs)
        xs = [self.spread(x, leading) for x in xs]
        found = []
        with without_mesh():
            for i in np.ndindex(*leading):
                found.append(function(*(move(lambda a, i=i: a[i], x) for x in xs)))

        def stack(arrays: Sequence) -> Any:
            return np.stack(arrays).reshape(leading + arrays[0].shape)

        if isinstance(found[0], Exact):
            return join(stack, found)
        return [join(stack, of_devices) for of_devices in zip(*found, strict=True)]

    # ---- programs

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        """Runs a jaxpr, closed or open.

        Args:
            program: the jaxpr.
            args: its arguments, or its constants and its arguments, as Exact or Ref.
        """
        caller = self._operation
        walk = steps(program, self._constant, args, caller)
        operation, values = next(walk)
        while operation is not None:
            self._operation = operation
            if self._is_reversed and _is_by_one_float(operation):
                a, b = (self.spread(x, self.leading(values)) for x in values)
                values = [dataclasses.replace(x, value=y.value) for x, y in ((a, b), (b, a))]
            outs = self._equation(operation, values)
            if self._observe is not None:
                self._observe(self, operation, values, outs)
            operation, values = walk.send(outs)
        self._operation = caller
        return values

    def named_operation(self) -> str:
        """Returns the primitive that is run, and where: `cond at model.py:12`."""
        return f"{self._operation.shown if self._operation else '?'} at {self.place()}"

    def place(self) -> str:
        """Returns file and line of the equation that is run."""
        return self._operation.place() if self._operation else "?"

    def _equation(self, operation: Operation, ins: list[Any]) -> list[Any]:
        eqn = operation.eqn
        name = operation.name
        if name in UNCHANGED:
            return ins
        try:
            body = None if name == "shard_map" else called(eqn)
            if (function := reference_of(eqn)) is not None:
                avals = [var.aval for var in eqn.invars]
                body = jax.make_jaxpr(function)(*avals)
            if body is not None:
                return self.run(body, ins)
            with np.errstate(all="ignore"):
                outs = RULES[name](self, eqn, *ins) if name in RULES else self._entries(eqn, ins)
        except (Undecided, Wrong) as error:
            if not error.place:
                error.place = operation.place()
                error.args = (f"{error.place}: {operation.shown}: {error}",)
            raise
        return [outs] if isinstance(outs, Exact | Ref) else outs

    def _entries(self, eqn: Any, ins: list[Exact]) -> Exact:
        """Applies a function of each entry."""
        name = eqn.primitive.name
        out = eqn.outvars[0].aval
        ins = [self.lift(x, len(out.shape)) for x in ins]
        if any(is_complex(x) for x in ins) or name == "complex":
            return elementwise.apply_to_complex(name, ins)
        if any(x.image is not None for x in ins):
            if name in elementwise.FLOATS:
                return elementwise.FLOATS[name](*ins)
            if name in elementwise.WITHOUT_LAWS:
                return elementwise.hash_function(name, ins)
        elif name in elementwise.INTEGERS and ins:
            value = elementwise.INTEGERS[name](*(x.value for x in ins))
            return Exact(np.asarray(value).astype(out.dtype, copy=False))
        kernel = kernel_of(eqn)
        raise Undecided(
            f"exact arithmetic has no rule for {kernel or name}: say what it computes, by `with "
            f"shardlib.exact.reference({kernel or name!r}, function)`"
        )

    # ---- devices

    def count(self, axes: Sequence[str]) -> int:
        """Returns the number of devices along axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def named(self, axes: Any) -> tuple[str, ...]:
        """Returns the axes that a parameter names."""
        axes = axes_of_entry(axes)
        if not all(axis in self._index for axis in axes):
            raise Undecided("an axis of vmap")
        if parted := [axis for axis in axes if axis in self.parted]:
            decides = self.parted[parted[0]]
            reached = f"not all devices of {', '.join(parted)} reach it"
            raise Wrong(f"{reached}: {decides} decides for each by itself")
        return axes

    def dim_of(self, axis: str) -> int:
        """Returns the leading dim of an axis."""
        return self._index[axis]

    def to_front(self, a: np.ndarray, axes: Sequence[str]) -> np.ndarray:
        """Returns the blocks of the devices along axes in a first dim, major to minor."""
        at = [self._index[axis] for axis in axes]
        shape = [*a.shape]
        for i, axis in zip(at, axes, strict=True):
            shape[i] = self.sizes[axis]
        a = np.moveaxis(np.broadcast_to(a, shape), at, range(len(at)))
        return np.expand_dims(a.reshape(-1, *a.shape[len(at) :]), tuple(i + 1 for i in sorted(at)))

    def from_front(self, a: np.ndarray, axes: Sequence[str]) -> np.ndarray:
        """Inverts `to_front`."""
        at = [self._index[axis] for axis in axes]
        a = np.squeeze(a, tuple(i + 1 for i in at))
        return np.moveaxis(
            a.reshape(*(self.sizes[axis] for axis in axes), *a.shape[1:]), range(len(at)), at
        )

    def cut(self, a: np.ndarray, dim: int, axes: Sequence[str]) -> np.ndarray:
        """Gives each device along axes its block of a dim."""
        if not axes:
            return a
        n = self.count(axes)
        dim += self.rank
        if a.shape[dim] % n:
            raise Wrong(f"a dim of {a.shape[dim]} entries is sharded over {n} devices")
        a = a.reshape(*a.shape[:dim], n, a.shape[dim] // n, *a.shape[dim + 1 :])
        return self.from_front(np.moveaxis(a, dim, 0), axes)

    def glue(self, a: np.ndarray, dim: int, axes: Sequence[str]) -> np.ndarray:
        """Inverts `cut`."""
        if not axes:
            return a
        dim += self.rank
        a = np.moveaxis(self.to_front(a, axes), 0, dim)
        return a.reshape(*a.shape[:dim], -1, *a.shape[dim + 2 :])


def _is_by_one_float(operation: Operation) -> bool:
    avals = [var.aval for var in (*operation.eqn.invars, *operation.eqn.outvars)]
    is_decision = operation.name.removesuffix("_to") in DECISIONS
    return is_decision and is_float(avals[0].dtype) and all(aval.size == 1 for aval in avals)


def axes_of_entry(entry: Any) -> tuple:
    """Returns the axes of an entry of a PartitionSpec, or of the parameter of a collective."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list | set | frozenset) else (entry,)


def encode_keys(keys: Any) -> np.ndarray:
    """Returns typed keys of threefry as uint64."""
    with without_mesh():
        return pack_keys(np.asarray(jax.random.key_data(keys)))


def pack_keys(data: np.ndarray) -> np.ndarray:
    """Returns the two uint32 of keys as one uint64."""
    if data.shape[-1] != 2:
        raise Undecided("keys of another generator than threefry")
    data = data.astype(np.uint64)
    return data[..., 0] << np.uint64(32) | data[..., 1]


def unpack_keys(keys: np.ndarray) -> np.ndarray:
    """Inverts `pack_keys`."""
    low = keys & np.uint64(0xFFFFFFFF)
    return np.stack([keys >> np.uint64(32), low], -1).astype(np.uint32)
