"""The source that a run kept, written to a directory, so that another process replays the run by it."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

from shardwright.run.provenance import PROJECT, ROOT, source_of
from shardwright_data.foreign import open_no_pipe, parse_json

_OF_A_CHECKPOINT = ("source", "programs", "traced_by", "untraced")


def kept_by(run: str, step: int) -> Path | None:
    """Where a run kept its source at its last start at or before a step; None if it kept none."""
    starts = [path for path in (Path(run) / "source").glob("*") if path.name.isdecimal() and int(path.name) <= step]
    return max(starts, key=lambda path: int(path.name), default=None)


def provenance_kept(kept: Path | None) -> dict[str, Any] | None:
    """What a checkpoint would say of the source that is kept; None if it is not known."""
    if kept is None or not (kept / "provenance.json").exists():
        return None
    with open(kept / "provenance.json", encoding="utf-8", opener=open_no_pipe) as file:
        try:
            about = parse_json(file.read())
        except ValueError as error:
            raise ValueError(f"{kept / 'provenance.json'} cannot be read: {error}. Copy it again.") from error
    if not isinstance(about, dict) or not isinstance(about.get("source"), dict):
        return None
    return {name: about[name] for name in _OF_A_CHECKPOINT if name in about}


def rebuilt(run: str, step: int, directory: Path, trust: bool) -> Path:
    """The root of the source by which a run did a step: that of this program, or one made in `directory`.

    Raises:
        ValueError: it is another than this one, and it is not trusted, or the run did not keep it.
    """
    kept = kept_by(run, step)
    about = provenance_kept(kept)
    if about is None or about["source"] == source_of():
        return ROOT
    if not trust:
        raise ValueError(
            f"{run} was made by other source, kept in {kept}. Its steps are replayed by that source, so its code runs: "
            "if the run is yours, or you have read that directory, give trust=true."
        )
    try:
        with zipfile.ZipFile(kept / "source.zip") as archive:
            archive.extractall(directory)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{run} was made by other source, and {kept / 'source.zip'} cannot be read: {error}. Check out the commit "
            "that provenance.json there names, and replay each run by its own."
        ) from error
    for path in kept.glob("*.py"):
        if path.name in about["source"].keys() - {*PROJECT}:
            shutil.copyfile(path, directory / path.name)
    return directory
