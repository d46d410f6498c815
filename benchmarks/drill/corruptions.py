"""Corruptions of the files of a checkpoint: what is restored is what was saved, or an error names what is damaged.

The checkpoints are those of `Checkpointer`, of a few small arrays, sharded over four simulated devices. Between two
steps some chunks stay the same. Corruptions in such a chunk, or in bytes that nothing reads, may change nothing.
"""

import functools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import shortened
from benchmarks.steps import simulate_devices
from training_io.checkpoint import Checkpointer

SAVED = (100, 101, 102)
"""Steps of the checkpoints. The last one is corrupted."""
SPECS = {
    "weights/embed": ((16, 8), "float32", ("t", "d")),
    "weights/layers/w_q": ((4, 8, 4), "float32", (None, "d", "t")),
    "weights/layers/w_k": ((4, 8, 4), "float32", (None, "d", "t")),
    "weights/norm": ((8,), "float32", ("t",)),
    "weights/frozen": ((8, 4), "float32", ("d", None)),
    "adam_mu/embed": ((16, 8), "float32", ("t", "d")),
    "adam_mu/norm": ((8,), "float32", (None,)),
    "counts": ((6,), "int32", (None,)),
    "flags": ((4,), "bool", (None,)),
}
"""Shape, dtype and axis of each dim of the arrays."""
CONSTANT = ("weights/frozen", "flags")
"""Arrays that are the same at all steps."""


def mesh(d: int = 2, t: int = 2) -> jax.sharding.Mesh:
    """A mesh of simulated devices."""
    return jax.make_mesh((d, t), ("d", "t"), devices=jax.devices()[: d * t])


def metadata(step: int) -> dict:
    """Metadata of a step, as a run has it: settings, and the state of its loader."""
    return {"config": {"training": {"seed": 7, "batch_size": 64}, "note": "drill"}, "loader": {"sequences": step * 64}}


def values(step: int) -> dict[str, np.ndarray]:
    """The arrays of a step by name, as NumPy makes them."""
    found = {}
    for number, (name, (shape, dtype, _)) in enumerate(SPECS.items()):
        draw = np.random.default_rng([number, 0 if name in CONSTANT else step])
        found[name] = draw.standard_normal(shape) if dtype == "float32" else draw.integers(0, 100, shape)
        found[name] = (found[name] > 50 if dtype == "bool" else found[name]).astype(dtype)
    return found


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Values by the path of their name, as dicts in dicts."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


def shardings(of: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    """The sharding of each array on a mesh."""
    return {name: NamedSharding(of, PartitionSpec(*axes)) for name, (_, _, axes) in SPECS.items()}


@functools.cache
def pristine(field: Field) -> Path:
    """Directory of the checkpoints before any corruption. Made once."""
    simulate_devices(4)
    directory = field.scratch / "pristine"
    with Checkpointer(directory) as checkpoints:
        for step in SAVED:
            state = nested({name: jax.device_put(x, shardings(mesh())[name]) for name, x in values(step).items()})
            checkpoints.save(step, state, metadata(step))
            checkpoints.wait()
    return directory


# ---- the corruptions -----------------------------------------------------------------------------------------------


class Target:
    """A checkpoint in `directory` to be corrupted, the one before it, and the draws of what is done to it."""

    def __init__(self, directory: Path, draw: random.Random, step: int = SAVED[-1], older: int = SAVED[-2]):
        self.draw, self.root = draw, directory
        self.path, self.older = directory / f"{step:010}", directory / f"{older:010}"

    def files(self, chunks: bool | None = None) -> list[Path]:
        """Its files; with `chunks`, the chunks alone, or all others."""
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return [path for path in found if chunks is None or chunks == (path.suffix != ".json")]

    def file(self, chunks: bool | None = None) -> Path:
        """One of its files: a chunk, or as often another one."""
        return self.draw.choice(self.files(self.draw.random() < 0.5 if chunks is None else chunks))

    def name(self, path: Path) -> str:
        """Path of a file in the checkpoint."""
        return str(path.relative_to(self.path))


def rewrite(path: Path, content: bytes) -> None:
    """Puts a new file in the place of one. Copies of the checkpoint are links to the same files."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def flipped_bit(target: Target) -> str:
    """One bit of a file is the other way round."""
    path, draw = target.file(), target.draw
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    rewrite(path, content)
    return target.name(path)


def truncated(target: Target) -> str:
    """A file ends early, or is empty."""
    path, draw = target.file(), target.draw
    content = path.read_bytes()
    rewrite(path, content[: draw.choice([0, 1, len(content) - 1, draw.randrange(len(content))])])
    return target.name(path)


def lengthened(target: Target) -> str:
    """A file goes on after its end."""
    path, draw = target.file(), target.draw
    rewrite(path, path.read_bytes() + draw.randbytes(draw.choice([1, 4, 4096])))
    return target.name(path)


def zeroed(target: Target) -> str:
    """Some bytes of a file are zero, as after a lost write."""
    path, draw = target.file(), target.draw
    content = bytearray(path.read_bytes())
    begin = draw.choice([0, draw.randrange(len(content))])
    end = draw.choice([len(content), min(len(content), begin + 16)])
    content[begin:end] = bytes(end - begin)
    rewrite(path, content)
    return target.name(path)


def deleted(target: Target) -> str:
    """A file is missing."""
    path = target.file()
    path.unlink()
    return target.name(path)


def deleted_folder(target: Target) -> str:
    """A folder is missing: an array, or its chunks."""
    path = target.draw.choice(sorted(path for path in target.path.rglob("*") if path.is_dir()))
    shutil.rmtree(path)
    return target.name(path)


def swapped_chunks(target: Target) -> str:
    """Two chunks of one length have changed places, in an array or between two."""
    first = target.file(chunks=True)
    others = [path for path in target.files(chunks=True) if path.stat().st_size == first.stat().st_size]
    second = target.draw.choice([path for path in others if path != first] or others)
    one, other = first.read_bytes(), second.read_bytes()
    rewrite(first, other), rewrite(second, one)
    return f"{target.name(first)} and {target.name(second)}"


def repeated_chunk(target: Target) -> str:
    """A chunk lies in the place of another one too."""
    first, second = target.file(chunks=True), target.file(chunks=True)
    rewrite(second, first.read_bytes())
    return f"{target.name(first)} at {target.name(second)}"


def older_chunk(target: Target) -> str:
    """A chunk is that of the step before."""
    path = target.file(chunks=True)
    rewrite(path, (target.older / target.name(path)).read_bytes())
    return target.name(path)


def older_array(target: Target) -> str:
    """An array is that of the step before."""
    path = target.path / target.draw.choice(list(SPECS))
    shutil.rmtree(path)
    shutil.copytree(target.older / target.name(path), path)
    return target.name(path)


def older_manifest(target: Target) -> str:
    """The manifest is that of the step before."""
    rewrite(target.path / "zarr.json", (target.older / "zarr.json").read_bytes())
    return "zarr.json"


def older_checkpoint(target: Target) -> str:
    """The whole checkpoint is that of the step before."""
    shutil.rmtree(target.path)
    shutil.copytree(target.older, target.path)
    return "all of it"


def metadata_of_another(target: Target) -> str:
    """The description of an array is that of another one."""
    first, second = (target.path / name / "zarr.json" for name in target.draw.sample(list(SPECS), 2))
    rewrite(first, second.read_bytes())
    return f"{target.name(second)} at {target.name(first)}"


def edited_json(target: Target) -> str:
    """A value in a description or in the manifest is another one, or is missing; it stays JSON."""
    path, draw = draw_json(target), target.draw
    content = json.loads(path.read_bytes())
    places = list(leaves(content))
    holder, key = draw.choice(places)
    old = holder[key]
    if draw.random() < 0.2:
        del holder[key]
    elif isinstance(old, bool) or old is None:
        holder[key] = not old
    elif isinstance(old, int | float):
        holder[key] = draw.choice([old + 1, old - 1, 0, -1, 2**40, str(old)])
    else:
        holder[key] = draw.choice(["", "x" + str(old), str(old).upper(), None, 5, "../" + str(old)])
    rewrite(path, json.dumps(content, indent=1).encode())
    return f"{target.name(path)}: {key} is not {old!r}"


def draw_json(target: Target) -> Path:
    """The manifest, or as often the description of an array."""
    return target.path / "zarr.json" if target.draw.random() < 0.5 else target.file(chunks=False)


def leaves(content: Any) -> Any:
    """Yields holder and key of each value in some JSON that holds no others."""
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        if isinstance(value, dict | list) and value:
            yield from leaves(value)
        else:
            yield content, key


def extra_file(target: Target) -> str:
    """A file or folder that no save has written, in the checkpoint or beside it."""
    draw = target.draw
    inside = draw.choice(sorted(path for path in target.path.rglob("*") if path.is_dir()))
    names = ["9", ".tmp", "zarr.json.tmp", "c", "lost+found", ".DS_Store", "x\ny"]
    beside = ["0000000103", "0000000103.tmp", "latest", "0000000099.tmp"]
    path = inside / draw.choice(names) if draw.random() < 0.7 else target.root / draw.choice(beside)
    if path.exists():
        return "nothing"
    if draw.random() < 0.5:
        path.mkdir()
    else:
        path.write_bytes(draw.randbytes(40))
    return str(path.relative_to(target.root))


def file_for_folder(target: Target) -> str:
    """A folder where a file was, or a file where a folder was."""
    path = target.draw.choice(sorted(target.path.rglob("*")))
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"")
    else:
        path.unlink()
        path.mkdir()
    return target.name(path)


CORRUPTIONS: dict[Callable[[Target], str], int] = {
    flipped_bit: 5,
    truncated: 3,
    lengthened: 2,
    zeroed: 2,
    deleted: 2,
    deleted_folder: 1,
    swapped_chunks: 2,
    repeated_chunk: 2,
    older_chunk: 3,
    older_array: 1,
    older_manifest: 1,
    older_checkpoint: 1,
    metadata_of_another: 1,
    edited_json: 3,
    extra_file: 2,
    file_for_folder: 1,
}
"""The corruptions, and how often each is drawn."""

# ---- what must become of them --------------------------------------------------------------------------------------


def judged(directory: Path, on: jax.sharding.Mesh) -> tuple[str, str | None]:
    """How a restore of the newest checkpoint ends, and what is wrong with that."""
    with Checkpointer(directory) as checkpoints:
        try:
            step = checkpoints.latest_step()
            arrays = values(SAVED[-1])
            like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings(on)[n]) for n, x in arrays.items()}
            found, its = checkpoints.restore(step, nested(like)), checkpoints.metadata(step)
        except (OSError, ValueError) as error:
            names = [*SPECS, f"{SAVED[-1]:010}", *(f"{step:010}" for step in SAVED)]
            named = any(name in str(error) for name in names)
            return "refused", None if named else f"an error that names no array or file: {shortened(str(error))}"
        except Exception as error:
            return "died", f"{type(error).__name__} instead of an error with a message: {shortened(str(error))}"
    if step not in SAVED:
        return "silent", f"step {step} was restored, which was never saved"
    at = lambda tree, name: functools.reduce(dict.get, name.split("/"), tree)
    differing = [name for name, expected in values(step).items() if not same(at(found, name), expected)]
    if differing or its != metadata(step):
        what = ", ".join(differing) or "the metadata"
        return "silent", f"{what} of step {step} restored with other values than were saved, without a word"
    return ("whole" if step == SAVED[-1] else "older"), None


def same(found: jax.Array, expected: np.ndarray) -> bool:
    """Whether two arrays are equal to the bit."""
    found = np.asarray(found)
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and found.tobytes() == expected.tobytes()


OUTCOMES = {
    "refused": "refused by name",
    "older": "not listed, an older one is",
    "whole": "restored as saved",
    "silent": "other values",
    "died": "no message",
}


def play(field: Field, case: int) -> Finding:
    """One corruption of a copy of the checkpoints, and a restore."""
    draw, directory = field.random(case), field.scratch / "corrupted"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(pristine(field), directory, copy_function=os.link)
    corrupt = draw.choices(list(CORRUPTIONS), list(CORRUPTIONS.values()))[0]
    where = corrupt(Target(directory, draw))
    outcome, wrong = judged(directory, mesh(d=2, t=2) if draw.random() < 0.5 else mesh(d=1, t=4))
    what = f"{corrupt.__name__.replace('_', ' ')}: {where!r}"
    return Finding(what, (wrong,) if wrong else (), outcomes=(OUTCOMES[outcome],))


KIND = Kind(
    name="corruptions",
    short=300,
    full=2000,
    checked="A restore raises an error that names the array or file, or every value and the metadata are, to the bit, "
    "those that were saved.",
    play=play,
)
