"""Exact execution: runs traced programs on all devices of a mesh at once, without rounding.

Importing the package registers the rules of primitives.
"""

from shardlib.exact import collectives, control, lookups, randoms, reductions, shapes
from shardlib.exact.compare import differences, same
from shardlib.exact.references import reference
from shardlib.exact.verdicts import check
