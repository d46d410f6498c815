"""Prints the settings for the devices of this machine, such as hardware=tpu hardware.chip=v5e: python -m tools.chip."""

import jax

from shardwright.plan.chips import chip_for


def settings_for(kind: str, platform: str) -> str:
    """Settings for devices that JAX calls `kind`. Without hardware.chip if no chip of that kind is known."""
    chip = chip_for(kind)
    return f"hardware={platform}" + (f" hardware.chip={chip.name}" if chip else "")


if __name__ == "__main__":
    print(settings_for(jax.devices()[0].device_kind, jax.devices()[0].platform))
