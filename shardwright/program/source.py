"""The source that a run consists of: files of this project, and the user's own modules."""

import functools
import hashlib
import sys
from pathlib import Path

from shardlib.places import is_installed

ROOT = Path(__file__).parents[2]
PACKAGES = ("shardlib", "shardwright")
TRAIN = ROOT / "shardwright/train.py"


def own_modules() -> list[Path]:
    """Lists the files of loaded modules that are the user's own: not of Python, installed packages
    or this project.

    The script `shardwright`, which an installer writes, is not one of them.
    """
    ours = *PACKAGES, "train.py", "jax_extra.py", "tools", "bench", "tests"
    within = tuple(f"{ROOT / name}/" for name in ours)
    files = {
        file for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))
    }
    own = (x for x in files if not f"{x}/".startswith(within) and not is_installed(x))
    return sorted(Path(file) for file in own if file.endswith(".py") and Path(file).is_file())


@functools.cache
def bytes_of(path: Path) -> bytes:
    """Returns a source file as it was when this program first read it; it may be edited during the
    run.
    """
    return path.read_bytes()


@functools.cache
def files_of_project() -> dict[str, list[Path]]:
    """Maps train.py, and each of PACKAGES, to its files.

    The programs are left out, as they do not train.
    """
    apart = TRAIN, ROOT / "shardwright/tools"
    files = {name: sorted((ROOT / name).rglob("*.py")) for name in PACKAGES}
    return {
        TRAIN.name: [TRAIN],
        **{
            name: [x for x in paths if not any(map(x.is_relative_to, apart))]
            for name, paths in files.items()
        },
    }


def source_of() -> dict[str, str]:
    """Maps the names in files_of_project, and of the user's own modules, to a hash of these
    files.
    """
    files = dict(files_of_project())
    for path in own_modules():  # several may have one name, such as __init__.py
        files[path.name] = [*files.get(path.name, ()), path]

    # Two files of one name may change places: their folders tell them apart.
    def part(path):
        return f"{path.parent.name}/{path.name} {len(bytes_of(path))}\n".encode() + bytes_of(path)

    return {
        name: hashlib.sha256(b"".join(map(part, paths))).hexdigest()[:20]
        for name, paths in files.items()
    }
