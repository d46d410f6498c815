"""Manifests of checkpoints with a checksum of what they say now, as a stranger can make them."""

import hashlib
import json
from pathlib import Path
from typing import Any


def sign(manifest: Path, attributes: dict[str, Any]) -> None:
    """Writes these attributes into a manifest, and their checksum."""
    kept = {key: value for key, value in attributes.items() if key != "sha256"}
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    group = json.loads(manifest.read_text()) | {
        "attributes": kept | {"sha256": hashlib.sha256(text.encode()).hexdigest()}
    }
    manifest.write_text(json.dumps(group))
