"""Carries settings from a small model to large ones: shows the scales of weights, and checks them.

    python -m tools.ladder scales --config-name=local_text optimizer.parametrization=mup \
        'optimizer.base={d_model: 64, n_kv: 1, d_ff: 176}'

`coordinates`, with the same settings, trains models of several widths or depths for a few steps.
Exit status 1: activations or gradients depend on the size. docs/ladder.md explains the output.

    python -m tools.ladder compare --config-name=track 'compare.idea=[model.qk_norm=true]' \
        'compare.widths=[96,192]' 'compare.seeds=[0,1,2]' paths.model_name=qk_norm

`compare` trains a baseline and an idea at several widths, and says how much the idea gains.
"""

import dataclasses
import sys

from shardwright.program.config import Config
from shardwright.run.launch import start_with_section
from shardwright.tools.ladder.compare import CompareConfig, compare
from shardwright.tools.ladder.coordinates import LadderConfig, check_coordinates
from shardwright.tools.ladder.scales import show_scales


@dataclasses.dataclass
class LadderRunConfig(Config):
    """All settings of a run, and the section `ladder`."""

    ladder: LadderConfig = dataclasses.field(default_factory=LadderConfig)


@dataclasses.dataclass
class CompareRunConfig(Config):
    """All settings of a run, and the section `compare`."""

    compare: CompareConfig = dataclasses.field(kw_only=True)


if __name__ == "__main__":
    about = __doc__ or ""
    commands = {"scales": show_scales, "coordinates": check_coordinates, "compare": compare}
    command = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in commands else "scales"
    if command == "compare":
        start_with_section("compare", CompareRunConfig, compare, about, "ladder compare")
    else:
        start_with_section("ladder", LadderRunConfig, commands[command], about)
