"""Carries settings from a small model to large ones: shows the scales of weights, and checks them.

    python -m tools.ladder scales --config-name=local_text optimizer.parametrization=mup \
        'optimizer.base={d_model: 64, n_kv: 1, d_ff: 176}'

`coordinates`, with the same settings, trains models of several widths or depths for a few steps.
Exit status 1: activations or gradients depend on the size. docs/ladder.md explains the output.
"""

import dataclasses
import sys

from shardwright.program.config import Config
from shardwright.run.launch import start_with_section
from shardwright.tools.ladder.coordinates import LadderConfig, check_coordinates
from shardwright.tools.ladder.scales import show_scales


@dataclasses.dataclass
class LadderRunConfig(Config):
    """All settings of a run, and the section `ladder`."""

    ladder: LadderConfig = dataclasses.field(default_factory=LadderConfig)


if __name__ == "__main__":
    commands = {"scales": show_scales, "coordinates": check_coordinates}
    command = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1] in commands else "scales"
    start_with_section("ladder", LadderRunConfig, commands[command], __doc__ or "")
