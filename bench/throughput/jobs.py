"""The contestants, and the sizes of models and batches."""

import dataclasses
import importlib.util
from pathlib import Path

from bench.throughput.peers.job import Job, Shapes

MODULES = {
    "ours": "ours",
    "cookbook": "cookbook_trainer",
    "torch": "torch_trainer",
    "torch-max-autotune": "torch_trainer",
    "seqax": "seqax_trainer",
    "floor": "floor",
}
NEEDS = {
    "cookbook": ((), ""),
    "torch": (("torch", "transformers"), "pip install torch transformers"),
    "torch-max-autotune": (("torch", "transformers"), "pip install torch transformers"),
    "ours": (("jax", "hydra", "omegaconf", "tensorstore", "rich"), "pip install -e ."),
    "floor": (("jax",), "pip install -e ."),
    "seqax": ((), ""),
}
SEQAX_NEEDS = "bench/throughput/seqax.txt"
"""What the step of seqax needs, for pip."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and a batch of sequences of `length` tokens. `config` is ours, a file of configs/."""

    shapes: Shapes
    sequences: int
    length: int
    config: str = "local_test_synthetic"


def _c4(d_model: int, n_kv: int, d_ff: int) -> Shapes:
    return Shapes(vocab=32768, d_model=d_model, layers=8, n_kv=n_kv, n_q_per_kv=1, d_head=128, d_ff=d_ff)


def _config(name: str) -> str:
    return f"flat_tokens_c4_a100x1_{name}"


CPU_SIZES = {
    "tiny": Size(Shapes(vocab=256, d_model=64, layers=2, n_kv=2, n_q_per_kv=2, d_head=16, d_ff=128), 2, 256),
    "2m": Size(Shapes(1280, 256, layers=2, n_kv=2, n_q_per_kv=2, d_head=32, d_ff=1024, rope_base=256), 64, 64),
    "4m": Size(Shapes(2048, 256, layers=4, n_kv=4, n_q_per_kv=2, d_head=32, d_ff=704), 8, 256),
    "10m": Size(Shapes(4096, 384, layers=4, n_kv=3, n_q_per_kv=2, d_head=64, d_ff=1024), 4, 512),
}
"""2m is configs/model/demo.yaml."""
GPU_SIZES = {
    "124m": Size(Shapes(50304, 768, layers=12, n_kv=12, n_q_per_kv=1, d_head=64, d_ff=2048), 64, 1024, _config("84m")),
    "270m": Size(_c4(1024, 16, 8192), 32, 1024, _config("270m")),
    "540m": Size(_c4(2048, 16, 8192), 32, 1024, _config("540m")),
    "1b": Size(_c4(2048, 16, 16384), 16, 1024, _config("1b")),
    "2b": Size(_c4(4096, 16, 16384), 16, 1024, _config("2b")),
}
"""270m to 2b are as in configs/model. 124m has the products of GPT-2: 124M parameters without the input table."""
SIZES = CPU_SIZES | GPU_SIZES | {"demo": CPU_SIZES["2m"]}


def missing(name: str) -> str | None:
    """The reason why a contestant cannot run here, or None."""
    modules, remedy = NEEDS[name]
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"{name} is skipped: no {' and no '.join(lacking)} here; {remedy}" if lacking else None


def check_seqax(checkout: Path) -> None:
    """Raises ValueError unless there is a checkout of seqax with an environment."""
    if not (checkout / "train.py").exists():
        raise ValueError(
            f"--seqax is {checkout}, where there is no train.py. Give a checkout: "
            "git clone https://github.com/MatX-inc/seqax"
        )
    if not (checkout / ".venv/bin/python").exists():
        raise ValueError(
            f"{checkout} has no environment .venv. Make it, with Python 3.11: "
            f"python3.11 -m venv {checkout}/.venv && {checkout}/.venv/bin/pip install -r {SEQAX_NEEDS}"
        )


def variant_of(job: Job, text: str) -> Job:
    """`job` with other settings: "training.save=dots,sequences=16". sequences and microbatches are fields of Job."""
    changes, settings = {}, []
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if name in ("sequences", "microbatches"):
            changes[name] = int(value)
        else:
            settings.append(setting)
    return dataclasses.replace(job, settings=(*job.settings, *settings), **changes)


def jobs_of(
    size: str,
    names: list[str],
    dtype: str,
    platform: str,
    extra: list[str],
    seqax: Path | None = None,
    parts: bool = False,
) -> dict[str, Job]:
    """The jobs by label. The floor is first: the figures of the others need it.

    Args:
        size: of SIZES.
        names: of MODULES.
        dtype: as in Job.
        platform: as in Job.
        extra: settings with which ours runs once more.
        seqax: the checkout of seqax.
        parts: whether the time of ours is measured by kind of kernel too.
    """
    s = SIZES[size]
    job = Job("", s.shapes, s.sequences, s.length, dtype, platform, config=s.config)
    of = lambda name, **changes: dataclasses.replace(job, contestant=MODULES[name], **changes)
    if size == "demo":
        found = {"floor": of("floor", d=4, t=2), "ours": of("ours", d=4, t=2)}
        found |= {"cookbook": of("cookbook", d=8), "seqax": of("seqax", d=4, t=2)}
        found = {label: job for label, job in found.items() if label in names}
    else:
        found = {name: of(name) for name in sorted(names, key=lambda name: name != "floor")}
    if "torch-max-autotune" in found:
        found["torch-max-autotune"] = of("torch", settings=("max-autotune",))
    if "ours" in found:
        found["ours"] = dataclasses.replace(found["ours"], parts=parts)
    if "seqax" in found:
        found["seqax"] = dataclasses.replace(found["seqax"], checkout=str(seqax))
    for text in extra if "ours" in names else []:
        found[f"ours {text}"] = variant_of(found["ours"], text)
    return found
