"""Compares two programs, each traced on one device, to find out if they compute the same.

A pipeline stage runs other code than a single device, and a mesh without the axis t other code than
one with t=1. Both are read as graphs of the same nodes (shardlib/graph.py), in which equal
computations are one node, so equal results are the same node.
"""

import itertools
from collections.abc import Iterator

from shardlib.graph import Graph, Nodes
from shardlib.interpret import Operation

VIEWS = ("reshape", "transpose", "split", "concatenate", "scan")
"""Primitives that messages do not name, because the programs differ before or inside them."""
AT_MOST, ALIKE = 20, 4
"""Limits of a search for extra equations: how many of them one program may have, and how many
equations after them must have the same names in both."""


def differences(
    ours: object, theirs: object, names: tuple[str, str], remedy: str, rounding: bool = False
) -> Iterator[str]:
    """Describes where two programs first differ; yields nothing if they compute the same.

    Args:
        ours: the result of jax.jit(f).trace(...).jaxpr.
        theirs: another one, with the same arguments and results.
        names: who runs each program, such as "one device", for the message.
        remedy: what to do.
        rounding: True if the programs may round numbers at different points. They must round to the
            same dtypes.
    """
    nodes = Nodes()
    a, b = (Graph(program, nodes, rounding) for program in (ours, theirs))
    if a.results == b.results:
        for x, y, name in ((a, b, names[0]), (b, a, names[1])):
            only_here = (key for key in x.rounded if key[0] in x.needed and key not in y.rounded)
            for key in itertools.islice(only_here, 1):
                problem = f"{x.rounded[key].place()}: only {name} rounds this to {key[1]}"
                yield f"{problem}\n  remedy: {remedy}"
        return
    only_in_one = [
        [
            op
            for node, op in x.computed.items()
            if node in x.needed and not (node in y.computed or node.is_zero or op.name in VIEWS)
        ]
        for x, y in ((a, b), (b, a))
    ]
    firsts = _firsts(only_in_one)
    found = [
        f"{op.place()}: {op.name}: {name} runs this"
        for ops, name in zip(firsts, names, strict=True)
        for op in ops
    ]
    text = "; ".join(found) or f"{' and '.join(names)} give other results of the same values"
    other = "" if len(found) != 1 else f", and {names[bool(firsts[0])]} does not"
    yield f"{text}{other}\n  remedy: {remedy}"


def _firsts(only_in_one: list[list[Operation]]) -> list[list[Operation]]:
    """Returns the first equation that each program has and the other lacks: at most one for each.

    `only_in_one` also has later equations, which are the same in both but compute with another
    value. If one program only has a few equations more, the list of the other one is empty.
    """
    names = [[op.name for op in ops] for ops in only_in_one]
    if names[0][:ALIKE] != names[1][:ALIKE]:
        for more, i in itertools.product(range(1, AT_MOST), (0, 1)):
            rest = names[i][more : more + ALIKE]
            if rest and rest == names[1 - i][: len(rest)]:
                return [only_in_one[k][:1] if k == i else [] for k in (0, 1)]
    return [ops[:1] for ops in only_in_one]
