"""Configurations that runs and checkpoints keep. A saved configuration is data: it may be a stranger's.

Nothing in it is resolved. A module that it names is imported only if it is shipped here, the user named it himself, or
he trusts the configuration.
"""

import re
from collections.abc import Mapping
from typing import Any

from shardlib.schedules import SCHEDULES
from shardwright.modeling.model import is_shipped
from shardwright.run.files import as_config
from shardwright_data.foreign import check_types

_METADATA = {
    "loader?": {"step?": int, "epoch?": int, "block?": int, "documents?": int, "tokens?": int},
    "provenance?": {"source": {str: str}, "programs": {str: str}, "traced_by": str, "untraced?": str},
    "skips?": {"count?": int, "in_a_row?": int, "norms?": [(int, float)]},
}
"""Types of a checkpoint's metadata beside the configuration, for check_types; older checkpoints lack some."""


def saved_config(metadata: Any) -> dict[str, dict]:
    """The configuration in the metadata of a checkpoint.

    Raises:
        ValueError: it has none, or another part of the metadata has not the type with which it is saved.
    """
    config = as_config(metadata.get("config") if isinstance(metadata, dict) else None, "the checkpoint's metadata")
    check_types("the checkpoint's metadata", metadata, _METADATA, "Take another checkpoint.")
    return config


def literal(value: Any) -> Any:
    """A saved value as OmegaConf takes it for what it says: `${oc.env:HOME}` is that text, and not a directory."""
    if isinstance(value, Mapping):
        return {key: literal(part) for key, part in value.items()}
    if isinstance(value, list):
        return [literal(part) for part in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def check_modules(saved: Mapping[str, Any], trust: bool) -> None:
    """Raises ValueError for a module, of the model or of the schedule, that is not shipped here, unless `trust`."""
    schedule = saved.get("pipeline", {}).get("schedule", "gpipe")
    module = saved.get("model", {}).get("module", "train")
    for name, value, known in (
        ("model.module", module, is_shipped(str(module))),
        ("pipeline.schedule", schedule, schedule in SCHEDULES),
    ):
        if not (known or trust):
            raise ValueError(
                f"{name} of the checkpoint is {value!r}, which is not shipped here: importing it runs its code. If the "
                "run is yours, or you have read that file, give trust=true."
            )
