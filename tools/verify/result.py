"""What tools/verify found, as JSON, for a model card: from the process that compares to the one that writes a file."""

import json
from pathlib import Path
from typing import Any

_FILE = "result.json"


def keep_result(job: str, compared: str, meshes: list[str], left_out: list[str], agree: bool, tensors: int) -> None:
    """Writes what one job found into its directory.

    Args:
        job: path of the job's file.
        compared: dtype in which values were compared; `types`: none were.
        meshes: names of the meshes that were compared with one device.
        left_out: names of those that were not, as they do not fit the model.
        agree: whether all of them agree with one device.
        tensors: number of tensors that were compared on each.
    """
    found = {"compared": compared, "meshes": meshes, "left_out": left_out, "agree": agree, "tensors": tensors}
    Path(job).with_name(_FILE).write_text(json.dumps(found))


def read_result(directory: Path) -> list[dict[str, Any]]:
    """What the job in `directory` found; empty if it was refused."""
    path = directory / _FILE
    return [json.loads(path.read_text())] if path.exists() else []
