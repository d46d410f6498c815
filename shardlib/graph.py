"""Reads a traced program as a graph in which equal computations are one node.

A Graph is of a program for one device, with what it calls in place of the calls. What changes
nothing there has no node: collectives, casts between JAX's types, offsets by axis_index, a reshape
that is undone, the order of equations, and what is computed twice. So two programs compute the same
if their results are the same nodes of one `Nodes`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib import equations
from shardlib.equations import Atom, Eqn, body_of, shape_of
from shardlib.interpret import Domain, Operation, in_words, interpret, literal_of
from shardlib.marks import GRADIENT_SUMS, LAYER_NUMBERS

_CASTS = equations.kinds("unreduced") | equations.words(
    "copy dynamic_slice slice convert_element_type"
)
_UNCHANGED = (equations.COLLECTIVES | equations.IDENTITIES | _CASTS) - {"stop_gradient", "ppermute"}
"""Primitives that return their operands on one device, if the type stays the same."""
_OF_MESHES = equations.words(
    "sharding out_sharding dst_sharding mesh concrete_mesh axis_size linear prevent_cse"
)
"""Parameters that do not affect values on one device."""
_WITH_THE_WHOLE = ("transpose", "reshape", "rows", "entry", "stacked")
"""Operations whose first input is cast where their result is."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A value of a program on one device.

    Attributes:
        op: what computes it: the name of a primitive, or
            argument  of the program, or of a body that a primitive applies by itself
            array     a literal, or an array that the program holds
            part      a further result of inputs[0]
            rows      some rows of inputs[0], from one to before another
            scan      a loop: what a turn makes of the carry, and its first carry
            stacked   what each turn of the loop inputs[1] makes; inputs[0] is that of one turn
            carried   what the loop inputs[0] carries after a turn
            carry     what a loop carries into a turn
            entry     the row of inputs[0] that a turn takes
        inputs: the values that it is computed from. Those of add and mul are in one order.
        params: what else decides it.
        shape: its shape. The first dim is None if it is that of any number of turns.
        number: its place in the order in which the nodes were made.
        is_zero: True for an integer 0, or an array of them.
    """

    op: str
    inputs: tuple["Node", ...]
    params: Any
    shape: tuple[int | None, ...]
    number: int
    is_zero: bool = False

    @property
    def is_one(self) -> bool:
        """True for a literal 1."""
        return self.op == "array" and self.shape == () and _array_of(self) == 1


class Nodes:
    """The nodes of one program or of several. Equal ones are the same object."""

    def __init__(self) -> None:
        self._known: dict[tuple, Node] = {}

    def node(
        self,
        op: str,
        *inputs: Node,
        params: Any = (),
        shape: tuple[int | None, ...] = (),
        is_zero: bool = False,
    ) -> Node:
        """Returns the node of this operation, inputs and parameters."""
        key = op, inputs, params
        if key not in self._known:
            self._known[key] = Node(op, inputs, params, tuple(shape), len(self._known), is_zero)
        return self._known[key]


class Graph(Domain[Node]):
    """A program as nodes.

    Attributes:
        results: those of its results.
        needed: those on which the results depend.
        computed: the first equation that computes a node, for each, needed or not.
        rounded: the equation that casts a value to fewer bits; by the whole array that it is a part
            of, and the dtype.
    """

    def __init__(self, program: object, nodes: Nodes, rounding: bool = False):
        """Reads a program: the result of jax.jit(f).trace(...).jaxpr.

        With `rounding`, numbers may be rounded at different points: a cast between float dtypes has
        no node, and is in `rounded`.
        """
        self.computed: dict[Node, Operation] = {}
        self.rounded: dict[tuple[Node, str], Operation] = {}
        self._nodes = nodes
        self._rounding = rounding
        # Sums of gradients, which take the dtype that their weight has in the step.
        self._sums: set[Node] = set()
        self._depth = 0
        self._changed: list[Node] = []  # the last equation on a reference
        self.results = interpret(program, self, self._arguments(program))
        self.results += self._changed
        self.needed = _inputs_of(self.results)

    def _arguments(self, program: object) -> list[Node]:
        """Makes nodes for the arguments of a program, or of a body that a primitive applies."""
        variables = enumerate(body_of(program)[0].invars)
        return [self._nodes.node("argument", params=i, shape=shape_of(x)) for i, x in variables]

    def constant(self, x: Any) -> Node:
        """Returns the node of an array, or of a literal."""
        return self._array(literal_of(x))

    def _array(self, x: object) -> Node:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        x = x.astype(np.float64) if self._rounding and jnp.issubdtype(x.dtype, jnp.floating) else x
        is_zero = equations.is_integer(x.dtype) and not x.any()
        params = str(x.dtype), x.shape, x.tobytes()
        return self._nodes.node("array", params=params, shape=x.shape, is_zero=is_zero)

    def _made(
        self,
        at: Operation,
        op: str,
        *inputs: Node,
        params: Any = (),
        shape: Sequence[int | None] | None = None,
        is_zero: bool = False,
    ) -> Node:
        """Returns the node of what an equation computes.

        It has the shape of the first result, unless another one is given.
        """
        shape = shape_of(at.eqn.outvars[0]) if shape is None else tuple(shape)
        node = self._nodes.node(op, *inputs, params=params, shape=shape, is_zero=is_zero)
        self.computed.setdefault(node, at)
        return node

    def follow(self, at: Operation, ins: list[Node]) -> list[Node]:
        """Returns the nodes of the results of an equation.

        One that reads or writes references depends on all that did so before, and its bodies count
        as they are written.
        """
        eqn = at.eqn
        if equations.called(eqn) is not None:
            return super().follow(at, ins)
        if _are_references([*eqn.invars, *eqn.outvars]):
            params = _in_words(eqn.params, with_bodies=True)
            node = self._made(at, at.name, *ins, *self._changed, params=params, shape=())
            self._changed = [node]
            return self._parts(at, node)
        if not eqn.outvars:
            return []
        same = self._unchanged(at, ins)
        return super().follow(at, ins) if same is None else same

    def _parts(self, at: Operation, node: Node) -> list[Node]:
        """Returns nodes of the results that an equation computes together."""
        return [
            self._nodes.node("part", node, params=i, shape=shape_of(var))
            for i, var in enumerate(at.eqn.outvars)
        ]

    def branch(self, at: Operation, which: Node, args: list[Node]) -> list[Node]:
        """Returns the results of a conditional."""
        branches = [interpret(branch, self, args, at) for branch in at.params["branches"]]
        return [
            self._made(at, "cond", which, *each, shape=shape_of(var))
            for *each, var in zip(*branches, at.eqn.outvars, strict=True)
        ]

    def apply(self, at: Operation, ins: list[Node]) -> list[Node]:
        """Returns the results of an equation that runs no body, or applies one by itself.

        The operands of add and mul are in one order, so x + y and y + x are one node.
        """
        eqn = at.eqn
        name = at.name
        if (rows := self._of_rows(at, ins)) is not None:
            return rows
        if name == "dot_general":
            return [self._product(at, ins)]
        if _reshapes(eqn):
            return [self._reshaped(at, ins[0], shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))]
        order = None
        if name in equations.ELEMENTWISE:
            ins, order = _before_moves(eqn, ins)
        if name in ("add", "mul"):
            ins = sorted(ins, key=lambda node: node.number)
        inner = list(equations.jaxprs_of(eqn))
        # That of a kernel works on references.
        is_kernel = any(_are_references(body_of(body)[0].invars) for body in inner)
        if is_kernel:
            inner = []
        bodies = [interpret(body, self, self._arguments(body), at) for body in inner]
        keeps_zero = name in ("broadcast_in_dim", "convert_element_type", "mul")
        is_zero = keeps_zero and any(x.is_zero for x in ins)
        is_zero = is_zero and equations.is_integer(eqn.outvars[0].aval.dtype)
        params = _in_words(eqn.params, is_kernel), *map(len, bodies)
        inputs = itertools.chain(*bodies, ins)
        shape = shape_of(eqn.outvars[0]) if order is None else ins[_whole_operand(eqn, ins)].shape
        node = self._made(at, name, *inputs, params=params, shape=shape, is_zero=is_zero)
        if order is not None:
            return [self._transposed(at, node, order)]
        return [node, *self._parts(at, node)[1:]]

    def _transposed(self, at: Operation, x: Node, order: tuple[int, ...]) -> Node:
        root, old = _moved(x)
        order = tuple(old[i] for i in order) if old else order
        if order == tuple(sorted(order)):
            return root
        return self._made(at, "transpose", root, params=order)

    def _product(self, at: Operation, ins: list[Node]) -> Node:
        """Returns a matmul; either operand may come first.

        So einsum("ab,bc->ac", x, w) and einsum("bc,ab->ac", w, x) are one node.
        """
        eqn = at.eqn
        contracted, batch = eqn.params["dimension_numbers"]
        ranks = [len(shape_of(var)) for var in eqn.invars]
        free = [ranks[k] - len(contracted[k]) - len(batch[k]) for k in (0, 1)]
        order = tuple(range(len(batch[0]) + sum(free)))
        if ins[0].number > ins[1].number:
            ins, contracted, batch = ins[::-1], contracted[::-1], batch[::-1]
            n = len(batch[0])
            m = len(batch[0]) + free[1]
            order = (*order[:n], *order[m:], *order[n:m])
        others = {name: value for name, value in eqn.params.items() if name != "dimension_numbers"}
        pairs = str((sorted(zip(*contracted, strict=True)), batch))
        out = shape_of(eqn.outvars[0])
        shape = [0] * len(order)
        for i, n in zip(order, out, strict=True):
            shape[i] = n
        node = self._made(at, "dot_general", *ins, params=(_in_words(others), pairs), shape=shape)
        return self._transposed(at, node, order)

    def loop(
        self, at: Operation, of_test: list[Node], of_body: list[Node], inits: list[Node]
    ) -> list[Node]:
        """Returns the results of a while loop, whatever the order in which it reads operands."""
        self._depth += 1
        carry = self._carry(at.eqn.outvars)
        outs = interpret(at.params["body_jaxpr"], self, [*of_body, *carry], at)
        test = interpret(at.params["cond_jaxpr"], self, [*of_test, *carry], at)
        loop = self._made(at, "while", *test, *inits, *outs, params=len(inits), shape=())
        self._depth -= 1
        return [
            self._nodes.node("carried", loop, params=i, shape=shape_of(var))
            for i, var in enumerate(at.eqn.outvars)
        ]

    def _carry(self, variables: Sequence) -> list[Node]:
        return [
            self._nodes.node("carry", params=(self._depth, i), shape=shape_of(var))
            for i, var in enumerate(variables)
        ]

    def scan(
        self, at: Operation, consts: list[Node], inits: list[Node], xs: list[Node]
    ) -> list[Node]:
        """Returns the results of a scan.

        Two scans count as one if the second continues where the first ends: a pipeline stage scans
        over the rows of its layers, one device over all rows.
        """
        length, is_back = at.params["length"], at.params["reverse"]
        rows = [(x.inputs[0], x.params[0]) if x.op == "rows" else (x, 0) for x in xs]
        start = rows[0][1] if rows else 0
        end = start + length
        carried, stacks = at.eqn.outvars[: len(inits)], at.eqn.outvars[len(inits) :]
        self._depth += 1
        carry = self._carry(carried)
        entries = [
            self._nodes.node("entry", root, params=(self._depth, row - start), shape=root.shape[1:])
            for root, row in rows
        ]
        outs = interpret(at.params["jaxpr"], self, [*consts, *carry, *entries], at)
        self._depth -= 1
        first, last = (end, start) if is_back else (start, end)
        step = outs[: len(inits)]
        loop = _continued(inits, step, is_back, first)
        if loop is None:
            params = is_back, first if inits else None
            loop = self._made(at, "scan", *step, *inits, params=params, shape=())
        found = [
            self._nodes.node("carried", loop, params=(last, i), shape=shape_of(var))
            for i, var in enumerate(carried)
        ]
        for y, var in zip(outs[len(inits) :], stacks, strict=True):
            shape = None, *shape_of(var)[1:]
            stacked = self._made(at, "stacked", y, loop, shape=shape)
            found.append(self._some_rows(at, stacked, start, end, shape_of(var)))
        return found

    def _of_rows(self, at: Operation, ins: list[Node]) -> list[Node] | None:
        """Returns rows of an array, their reshape, or concatenated rows; None for other equations.

        The rows 0 to 2 and 2 to 4 of x: [4, 3], concatenated, are x.
        """
        eqn = at.eqn
        name = at.name
        params = at.params
        shape = shape_of(eqn.invars[0]) if ins else ()
        if not shape or not (ins[0].op == "rows" or name in ("split", "slice")):
            return None
        root = ins[0]
        start = 0
        end = shape[0]
        if root.op == "rows":
            start, end = root.params
            root = root.inputs[0]
        new = shape_of(eqn.outvars[0])
        if name == "split" and params["axis"] == 0:
            ends = itertools.accumulate(params["sizes"], initial=start)
            return [
                self._some_rows(at, root, *span, shape_of(var))
                for span, var in zip(itertools.pairwise(ends), eqn.outvars, strict=True)
            ]
        if name == "slice" and not params["strides"] and shape[1:] == new[1:]:
            first, end = (start + params[which][0] for which in ("start_indices", "limit_indices"))
            return [self._some_rows(at, root, first, end, new)]
        if name == "concatenate" and params["dimension"] == 0 and _follow(ins):
            return [self._some_rows(at, root, start, ins[-1].params[1], new)]
        if _reshapes(eqn) and new and not any(n * new[0] % shape[0] for n in (start, end)):
            start, end = (n * new[0] // shape[0] for n in (start, end))
            count = root.shape[0] and root.shape[0] * new[0] // shape[0]
            root = self._reshaped(at, root, (root.shape[0], *shape[1:]), (count, *new[1:]))
            return [self._some_rows(at, root, start, end, new)]
        return None

    def _reshaped(self, at: Operation, x: Node, old: tuple, new: tuple) -> Node:
        """Returns `x`, of shape `old`, in the shape `new`.

        Either may begin with None, as Node.shape.
        """
        root, shape = (x.inputs[0], x.inputs[0].shape) if x.op == "reshape" else (x, old)
        return root if shape == new else self._made(at, "reshape", root, params=new, shape=new)

    def _some_rows(
        self, at: Operation, root: Node, start: int, end: int, shape: tuple[int, ...]
    ) -> Node:
        if (start, end) == (0, root.shape[0]):
            return root
        return self._made(at, "rows", root, params=(start, end), shape=shape)

    def _unchanged(self, at: Operation, ins: list[Node]) -> list[Node] | None:
        """Returns the operands that an equation returns unchanged; None if it computes."""
        eqn = at.eqn
        name = at.name
        params = at.params
        if name == "axis_index":
            return [self._array(np.int32(0))]
        if params.get("name") == GRADIENT_SUMS:
            self._sums.add(ins[0])
        outs = eqn.outvars
        keeps = _types(eqn.invars[: len(outs)]) == _types(outs)
        if name in _UNCHANGED and keeps and params.get("name") != LAYER_NUMBERS:
            return ins[: len(outs)]
        if name == "transpose":
            return [self._transposed(at, ins[0], tuple(params["permutation"]))]
        if self._rounding and name == "convert_element_type":
            dtypes = [var.aval.dtype for var in (eqn.invars[0], outs[0])]
            if all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
                self._round(at, ins[0])
                return ins[:1]
        # Since jax 0.12 the integer of 2 * x is converted in the program.
        if name == "convert_element_type" and ins[0].op == "array" and not ins[0].shape:
            return [self._array(_array_of(ins[0]).astype(outs[0].aval.dtype))]
        if name == "pad" and not any(map(any, params["padding_config"])):
            return ins[:1]
        if name in ("add", "sub") and ins[1].is_zero:
            return ins[:1]
        if name == "div" and ins[1].is_one:
            return ins[:1]
        return ins[1:] if name == "add" and ins[0].is_zero else None

    def _round(self, at: Operation, x: Node) -> None:
        """Notes a cast to fewer bits."""
        old, new = (jnp.finfo(var.aval.dtype) for var in (at.eqn.invars[0], at.eqn.outvars[0]))
        while x.op in _WITH_THE_WHOLE:
            x = x.inputs[0]
        if x not in self._sums and (new.nmant < old.nmant or new.nexp < old.nexp):
            self.rounded.setdefault((x, str(new.dtype)), at)


def _continued(inits: list[Node], step: list[Node], is_back: bool, first: int) -> Node | None:
    """Finds the loop whose last carry is `inits`, if it does the same and ends at turn `first`."""
    if not inits or inits[0].op != "carried" or inits[0].inputs[0].op != "scan":
        return None
    loop = inits[0].inputs[0]
    is_last = all(
        x.op == "carried" and x.inputs[0] is loop and x.params == (first, i)
        for i, x in enumerate(inits)
    )
    is_same = len(loop.inputs) == 2 * len(inits) and loop.inputs[: len(step)] == tuple(step)
    return loop if is_last and is_same and loop.params[0] == is_back else None


def _follow(nodes: list[Node]) -> bool:
    """Returns True if all are rows of one array, each from where the one before ends."""
    is_one = all(x.op == "rows" and x.inputs == nodes[0].inputs for x in nodes)
    return is_one and all(a.params[1] == b.params[0] for a, b in itertools.pairwise(nodes))


def _array_of(node: Node) -> np.ndarray:
    dtype, shape, content = node.params
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)


def _moved(x: Node) -> tuple[Node, tuple[int, ...] | None]:
    """Returns the value whose dims a transpose moved, and their order.

    Of another value, returns this value and None.
    """
    return (x.inputs[0], x.params) if x.op == "transpose" else (x, None)


def _entry_of(x: Node) -> Node | None:
    """Returns a scalar that all entries of a value are; None if they may differ."""
    if not x.shape:
        return x
    is_even = x.op == "broadcast_in_dim" and not x.inputs[0].shape
    return x.inputs[0] if is_even else None


def _before_moves(eqn: Eqn, ins: list[Node]) -> tuple[list[Node], tuple[int, ...] | None]:
    """Returns operands of an elementwise equation before their dims are moved.

    Also returns how they are moved, if they are. An operand with equal entries is replaced by one
    of them, as long as another operand has the shape.
    """
    even = [_entry_of(x) for x in ins]
    if None not in even:
        return ins, None
    orders = {_moved(x)[1] for x, one in zip(ins, even, strict=True) if one is None}
    order = orders.pop() if len(orders) == 1 else None
    roots = [x if order is None else _moved(x)[0] for x in ins]
    return [root if one is None else one for root, one in zip(roots, even, strict=True)], order


def _whole_operand(eqn: Eqn, ins: list[Node]) -> int:
    """Finds an operand that has the shape of the result, up to the order of its dims."""
    rank = len(shape_of(eqn.outvars[0]))
    return next(i for i, x in enumerate(ins) if len(x.shape) == rank)


def _inputs_of(nodes: list[Node]) -> set[Node]:
    """Returns all nodes on which some depend, and these."""
    found = set(nodes)
    rest = list(nodes)
    while rest:
        new = set(rest.pop().inputs) - found
        found |= new
        rest += new
    return found


def _reshapes(eqn: Eqn) -> bool:
    """Returns True if the result has the entries of the operand in the same order."""
    name = eqn.primitive.name
    if name in ("reshape", "squeeze"):
        return eqn.params.get("dimensions") is None or name == "squeeze"
    if name != "broadcast_in_dim" or shape_of(eqn.invars[0]) == ():
        return False
    return math.prod(shape_of(eqn.invars[0])) == math.prod(shape_of(eqn.outvars[0]))


def _types(variables: Any) -> list:
    return [(var.aval.shape, var.aval.dtype) for var in variables]


def _are_references(variables: Iterable[Atom]) -> bool:
    """Returns True if one of them is a reference: an array that changes in place."""
    return any(hasattr(var.aval, "inner_aval") for var in variables)


def _in_words(params: Mapping[str, Any], with_bodies: bool = False) -> str:
    """Describes the parameters of an equation, but for those of the mesh, and for bodies."""
    found = {}
    for name, value in params.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        if name not in _OF_MESHES and (with_bodies or not any(map(equations.is_program, parts))):
            found[name] = value
    return in_words(found)
