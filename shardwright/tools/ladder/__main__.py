"""Carries settings from a small model to large ones: shows the scales of weights, checks them, searches settings.

    python -m tools.ladder scales --config-name=local_text optimizer.parametrization=mup \
        'optimizer.base={d_model: 64, n_kv: 1, d_ff: 176}'
    python -m tools.ladder search --config-name=track optimizer.learning_rate=1e-3,2e-3,4e-3,8e-3 training.seed=0,1,2

`coordinates`, with the settings of `scales`, trains models of several widths or depths for a few steps. Exit status 1:
activations or gradients depend on the size. `search` finds the best of several values by successive halving.
docs/ladder.md explains the output.
"""

import dataclasses
import functools
import sys

from shardwright.run.config import Config
from shardwright.run.launch import start_with_section
from shardwright.tools.ladder.coordinates import LadderConfig, check_coordinates
from shardwright.tools.ladder.scales import show_scales
from shardwright.tools.ladder.search import SearchConfig, search, swept


@dataclasses.dataclass
class LadderRunConfig(Config):
    """All settings of a run, and the section `ladder`."""

    ladder: LadderConfig = dataclasses.field(default_factory=LadderConfig)


@dataclasses.dataclass
class SearchRunConfig(Config):
    """All settings of a run, and the section `ladder` of `search`."""

    ladder: SearchConfig = dataclasses.field(default_factory=SearchConfig)


if __name__ == "__main__":
    commands = {"scales": show_scales, "coordinates": check_coordinates, "search": search}
    command = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in commands else "scales"
    if command == "search":
        given = sys.argv[1:]
        sys.argv[1:], grid = swept(given)
        start_with_section("ladder", SearchRunConfig, functools.partial(search, given, grid), __doc__ or "")
    else:
        start_with_section("ladder", LadderRunConfig, commands[command], __doc__ or "")
