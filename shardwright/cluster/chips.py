"""Reads the kinds of chips, YAML files in chips/: FLOP/s, bandwidths, and calibration constants."""

import bisect
import csv
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardlib.parsing import did_you_mean
from shardwright.data.untrusted import parse_yaml, read_file, read_text

CHIPS = Path(__file__).parent / "chips"
"""Directory of the chips that have names."""
_MOST_BYTES = 2**20
_LOSSES = (
    "interference",
    "layer_s",
    "launch_s",
    "near_latency_s",
    "far_latency_s",
    "passing_latency_s",
)
_MAY_BE_0 = (*_LOSSES, "error")
_PLATFORMS = ("gpu", "tpu", "cpu")
_MOST = {
    **dict.fromkeys(("matmul_share", "attention_share", "memory_share", "link_share"), 2),
    **dict.fromkeys(("interference", "error"), 1),
    "near": 2**20,
}
"""Upper limits of some fields. A share of a measured rate may exceed 1; larger values are probably
percentages."""
_WORDS = {
    "title": "a text",
    "platform": f"one of {', '.join(_PLATFORMS)}",
    "kinds": "a list of names that JAX gives to the device",
    "peak": "a mapping of dtypes, bf16 among them, to FLOP/s",
}
"""What the non-numeric fields must be."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rates measured on a grid of sizes: log-linear between grid points, constant above the
    largest.
    """

    sizes: tuple[tuple[int, ...], ...]
    rates: np.ndarray

    def rate(self, *at: float) -> float:
        """Interpolates the rate at these sizes. Below the grid, extrapolates the first slope."""
        found = self.rates
        for sizes, size in zip(self.sizes, at, strict=True):
            if len(sizes) == 1:
                found = found[0]
                continue
            i = min(max(bisect.bisect(sizes, size) - 1, 0), len(sizes) - 2)
            share = math.log(min(size, sizes[-1]) / sizes[i]) / math.log(sizes[i + 1] / sizes[i])
            found = found[i] ** (1 - share) * found[i + 1] ** share
        return float(found)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of device. Rates are per device and second.

    Attributes:
        name, title: short name, and the vendor's.
        platform: gpu, tpu or cpu.
        kinds: names that JAX gives to it (jax.Device.device_kind).
        peak: dense FLOP/s by dtype.
        memory_bytes: memory that XLA can use, in bytes.
        memory_bandwidth: memory bandwidth, in bytes/s.
        near: number of devices in a group with fast links.
        near_bandwidth: bytes/s that a device sends within its group, in a ring.
        far_bandwidth: bytes/s that a device sends to other groups.
        price_per_hour: dollars on demand; None if unknown.
        matmul_share: share of `products`, or of the peak, that matmuls of a run reach.
        attention_share: share of the peak that attention kernels reach.
        memory_share, link_share: shares of the bandwidths that a run reaches.
        interference: seconds by which a second of communication slows down computation that
            overlaps with it.
        launch_s: seconds to launch a kernel.
        layer_s: host seconds per layer and microbatch; 0 for a compiled step.
        near_latency_s: seconds per hop of a collective within a group.
        far_latency_s: seconds of a hop to the next group.
        passing_latency_s: seconds of a hop within a group, in a ring that passes through other
            groups too.
        error: relative error of step times that four of five runs stayed within.
        products: measured FLOP/s of bf16 matmuls alone, by m, k, n.
        collectives: by operation, measured bytes/s of collectives in a group, by devices and bytes;
            link_share is then the share of these.
        sources: source of each number, by name.
    """

    name: str
    title: str
    platform: str
    kinds: tuple[str, ...]
    peak: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    near: float
    near_bandwidth: float
    far_bandwidth: float
    price_per_hour: float | None
    matmul_share: float
    attention_share: float
    memory_share: float
    link_share: float
    interference: float
    launch_s: float
    layer_s: float
    near_latency_s: float
    far_latency_s: float
    error: float
    passing_latency_s: float = 0.0
    products: Table | None = dataclasses.field(default=None, compare=False, repr=False)
    collectives: Mapping[str, Table] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def at_its_peaks(self) -> "Chip":
        """This chip at the vendor's figures, without any losses: a lower bound of step times."""
        shares = dict.fromkeys(
            ("matmul_share", "attention_share", "memory_share", "link_share"), 1.0
        )
        free = dict.fromkeys(_LOSSES, 0.0)
        return dataclasses.replace(self, products=None, collectives={}, **shares, **free)

    def peak_of(self, dtype: str) -> float:
        """Returns the dense FLOP/s of a dtype; bf16's if there is no figure."""
        return self.peak.get(dtype, self.peak["bf16"])

    def matmul_s(self, b: int, m: int, k: int, n: int, dtype: str) -> float:
        """Predicts the seconds of b matmuls of m×k by k×n matrices, without memory traffic.

        A batch counts as more rows. Other dtypes reach the same share of their peak as bf16 does.
        """
        measured = self.products.rate(b * m, k, n) if self.products else self.peak["bf16"]
        return (
            2
            * b
            * m
            * k
            * n
            / (measured * self.matmul_share * self.peak_of(dtype) / self.peak["bf16"])
        )

    def reach(self, mesh: Mapping[str, int], axes: Sequence[str]) -> tuple[float, int]:
        """Returns how many devices along these axes are in a group with fast links, and the number
        of groups.
        """
        strides: dict[str, int] = {}
        for axis in reversed([*mesh]):
            strides[axis] = math.prod(mesh[inner] for inner in strides)
        near = math.prod(min(mesh[axis], max(1, self.near // strides[axis])) for axis in axes)
        return near, math.ceil(math.prod(mesh[axis] for axis in axes) / near)

    def collective_s(
        self, op: str, size: float, mesh: Mapping[str, int], axes: Sequence[str]
    ) -> float:
        """Predicts the seconds of a collective.

        A ring moves (n - 1) / n of the bytes past each device, and twice that for an all-reduce
        (NCCL's performance page). Between groups, the devices of a group share the traffic. A ring
        of groups takes a hop per other group, and passes through each device of a group; NCCL
        all-reduces along trees instead.

        Args:
            op: all_gather, psum_scatter, psum, all_to_all or ppermute.
            size: bytes of the whole array; for ppermute, psum and all_to_all, of one device.
            mesh: number of devices along each axis, major to minor. Devices along the last axis are
                neighbors.
            axes: axes of the collective.
        """
        near, far = self.reach(mesh, axes)
        n = math.prod(mesh[axis] for axis in axes)
        if n == 1:
            return 0.0
        near_bytes = far_bytes = size
        hops = far_hops = 1
        if op != "ppermute":
            times = 2 if op == "psum" else 1
            # In an all_to_all each device sends different bytes. In the others, devices of a group
            # send the same, and all groups form one ring.
            shared, ring = (1, far) if op == "all_to_all" else (near, n)
            near_bytes = times * size * (near - 1) / near
            far_bytes = times * size * (ring - 1) / ring / shared
            hops = times * (n - 1 if self.platform == "tpu" else math.ceil(math.log2(n)))
            far_hops = (
                far - 1
                if op in ("all_gather", "psum_scatter")
                else times * math.ceil(math.log2(far))
            )
        if table := self.collectives.get(op):
            size = max(size, table.sizes[-1][0])  # a smaller message takes just as long
            near_s = size / (table.rate(near, size) * self.link_share) if near > 1 else 0.0
        else:
            near_s = (
                near_bytes / (self.near_bandwidth * self.link_share) + hops * self.near_latency_s
            )
        if far == 1:
            return near_s
        hop_s = self.far_latency_s + (near - 1) * self.passing_latency_s
        return max(near_s, far_bytes / (self.far_bandwidth * self.link_share) + far_hops * hop_s)


def known() -> list[str]:
    """Lists the names of the chips in CHIPS.

    Files whose names begin with _ are bases for other chips.
    """
    return sorted(path.stem for path in CHIPS.glob("[!_]*.yaml"))


def chip_of(name: str) -> Chip:
    """Loads the chip of this name, or from a YAML file at this path.

    Each number is given as {value, source}. A file may name a chip that it is `like`, and then
    gives only differences. Raises ValueError for an unknown name, and for a field that is missing,
    unknown or not valid.
    """
    path = Path(name) if name.endswith(".yaml") else CHIPS / f"{name}.yaml"
    if not path.exists():
        raise ValueError(
            f"{name} is not a known chip: choose one of {', '.join(known())}, or give the path of "
            f"a YAML file.{did_you_mean(name, known())}"
        )
    data = _fields_of(path)
    optional = {"products", "collectives", "passing_latency_s"}
    needed = {field.name for field in dataclasses.fields(Chip)} - {"name", "sources", *optional}
    if wrong := needed - set(data):
        raise ValueError(
            f"{path} has no {min(wrong)}. Add it as {{value, source}}, or say which chip it is "
            f"like."
        )
    if wrong := set(data) - needed - optional:
        raise ValueError(
            f"{path} has an unknown {min(wrong)}. A chip has {', '.join(sorted(needed))}."
        )
    values = {key: _value(path, key, field["value"]) for key, field in data.items()}
    return Chip(
        name=path.stem, sources={key: field["source"] for key, field in data.items()}, **values
    )


@functools.cache
def chip_for(kind: str) -> Chip | None:
    """Returns the chip of a jax.Device.device_kind; None if it is unknown."""
    return next((chip for chip in map(chip_of, known()) if kind in chip.kinds), None)


def settings_for(kind: str, platform: str) -> str:
    """Returns the settings for devices that JAX calls `kind`, without hardware.chip if that chip is
    unknown.
    """
    chip = chip_for(kind)
    return f"hardware={platform}" + (f" hardware.chip={chip.name}" if chip else "")


_parsed = functools.cache(parse_yaml)  # many chips are like one


def _fields_of(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the fields of a file as {value, source}, on top of those of the chip that it is
    like.
    """
    text = read_text(path, _MOST_BYTES)
    try:
        data = _parsed(text)
        own = {
            key: x if isinstance(x, dict) else {"value": x, "source": path.name}
            for key, x in data.items()
        }
    except ValueError as e:
        raise ValueError(f"{path} is not a YAML mapping of names to {{value, source}}: {e}.") from e
    except AttributeError:
        raise ValueError(
            f"{path} is not a YAML mapping of names to {{value, source}}: start it with like: h100."
        ) from None
    if wrong := [key for key, field in own.items() if set(field) != {"value", "source"}]:
        raise ValueError(f"{path}: {wrong[0]} is not {{value, source}}.")
    base = own.pop("like", {"value": None})["value"]
    if base is not None and not (CHIPS / f"{base}.yaml").exists():
        raise ValueError(
            f"{path} is like {base}, which is not a known chip: choose one of {', '.join(known())}."
        )
    return (_fields_of(CHIPS / f"{base}.yaml") if base else {}) | own


def _value(path: Path, key: str, x: object) -> Any:
    """Converts a field of a Chip. Table files are next to `path` or in CHIPS."""
    if x is None and key == "price_per_hour":
        return x
    if key == "title" and isinstance(x, str):
        return x
    if key == "platform" and x in _PLATFORMS:
        return x
    if key == "kinds" and isinstance(x, list) and x and all(isinstance(kind, str) for kind in x):
        return tuple(x)
    if key == "peak" and isinstance(x, dict) and "bf16" in x:
        return {dtype: _value(path, f"peak of {dtype}", rate) for dtype, rate in x.items()}
    if key in _WORDS:
        raise ValueError(f"{path}: {key} is {x}; it must be {_WORDS[key]}.")
    if key in ("products", "collectives"):
        return _tables(path, key, x)
    try:
        number = math.nan if isinstance(x, bool) else float(str(x))  # YAML reads 1e9 as a text
    except (TypeError, ValueError):
        number = math.nan
    most = _MOST.get(key, math.inf)
    least = 1 if key == "near" else 0
    if not (least <= number < math.inf and number <= most) or (
        number == 0 and key not in _MAY_BE_0
    ):
        limit = (
            f"; it must be at most {most}"
            if most <= number < math.inf
            else ", which is not a positive number"
        )
        raise ValueError(f"{path}: {key} is {x}{limit}.")
    return int(number) if key == "near" else number


def _tables(path: Path, key: str, x: object) -> Any:
    """Reads the table of matmuls in a file, or the tables of collectives by operation."""
    if not x:
        return None if key == "products" else {}
    if key == "products" and not str(x).endswith(".csv"):  # one rate, of all sizes
        return Table(((1,),) * 3, np.full((1, 1, 1), _value(path, "FLOP/s of products", x)))
    file = next(
        (found for found in (path.parent / str(x), CHIPS / str(x)) if found.exists()),
        path.parent / str(x),
    )
    try:
        lines = read_file(file, _MOST_BYTES).decode().splitlines()
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
        if key == "products":
            return _table(rows, ("m", "k", "n"), "tflops", 1e12)
        by_op = {row["op"]: [other for other in rows if other["op"] == row["op"]] for row in rows}
        return {
            op: _table(of_op, ("devices", "bytes"), "gb_per_s", 1e9) for op, of_op in by_op.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no column {error}" if isinstance(error, KeyError) else error
        like = "m,k,n,tflops" if key == "products" else "op,devices,bytes,gb_per_s"
        raise ValueError(
            f"{path}: {key} is {x}, which is not a table of {like} with a row per grid point: "
            f"{what}."
        ) from None


def _table(rows: list[dict[str, str]], keys: Sequence[str], rate: str, unit: float) -> Table:
    """Makes a Table from the rows of a CSV file, one per grid point."""
    found = {tuple(int(row[key]) for key in keys): float(row[rate]) * unit for row in rows}
    if not found or not all(min(at) > 0 and 0 < found[at] < math.inf for at in found):
        raise ValueError("sizes and rates must be above 0")
    sizes = tuple(tuple(sorted(set(axis))) for axis in zip(*found, strict=True))
    return Table(
        sizes, np.array([found[at] for at in sorted(found)]).reshape([len(axis) for axis in sizes])
    )
