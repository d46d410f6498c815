"""Mistakes in settings: what `train` and each tool print for some 500 of them.

    python -m benchmarks.bad_settings              # all: minutes on one core
    python -m benchmarks.bad_settings generate     # those with this in their command, or of this kind

A mistake is answered well with exit status 1 or 2, nothing on standard output, a message on standard error that begins
with "Error: ", names what is wrong and says what to do, no traceback, and no file left behind. The program prints each
answer that is not so, and a table. Exit status 1: there is one.

Each command runs in a process that is forked after the imports, which take most of the time of a start. A test of
`python -m train` itself is in tests/configuration.
"""

import contextlib
import dataclasses
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUN = ("--config-name=local_test_synthetic", f"data.filespec={ROOT}/synthetic_dataset.zarr")
"""Arguments of a run that would start."""
TOOLS = {
    "tools.generate": ("run={tmp}/none", "prompt=a"),
    "tools.checkpoint_to_huggingface": ("run={tmp}/none", "output={tmp}/out"),
    "tools.huggingface_to_checkpoint": ("model={tmp}/none", "output={tmp}/out"),
    "tools.huggingface_to_flat_tokens": ("out={tmp}/x.zarr", "train.files=[{tmp}/none.jsonl]", "validation=null"),
    "tools.inspect_data": (f"filespec={ROOT}/synthetic_dataset.zarr",),
    "tools.merge_flat_tokens": ("out={tmp}/x.zarr",),
    "tools.write_synthetic_dataset": ("out={tmp}/x.zarr",),
    "tools.compare": ("runs={tmp}/none",),
    "tools.schedule": ("schedule=gpipe", "p=2", "m=4"),
}
"""Each tool with its own settings, and arguments that it needs."""
SECONDS = 20
"""Longest time of a command. One that takes longer hangs."""
MEMORY = 24 * 2**30
"""Largest address space of a command, in bytes, so that none takes the memory of the machine."""
REMEDY = re.compile(
    r"must|[Cc]hoose|[Cc]heck|[Gg]ive|[Dd]id you mean|"
    r"\b[Ss]et |[Ww]rite|[Ll]eave|\b[Uu]se |\b[Pp]ut |install|lists|[Cc]orrect|"
    r"[Tt]here (are|is)|[Ss]tart|[Mm]ove|name a run|[Rr]emove|[Mm]ake|[Rr]ead|[Ll]et|fit"
)
"""Words of which a message that says what to do has one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A command with a mistake.

    Attributes:
        program: module that Python runs.
        arguments: its arguments; {tmp} is the directory in which it runs, an empty one.
        names: what the message must contain: the setting, the file or the value that is wrong.
        kind: kind of the mistake.
    """

    program: str
    arguments: tuple[str, ...]
    names: str
    kind: str

    def __str__(self) -> str:
        return f"python -m {self.program} {' '.join(self.arguments)}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command did. `status` is None where it took longer than SECONDS, and negative after a signal."""

    case: Case
    status: int | None
    stdout: str
    stderr: str
    left: list[str]
    seconds: float

    def problems(self) -> list[str]:
        """What is wrong with the answer."""
        error = self.stderr
        found = {
            "accepted": self.status == 0,
            "hangs": self.status is None,
            f"ends with {self.status}": self.status not in (0, 1, 2, None),
            "traceback": "Traceback (most recent call last)" in error or '  File "' in error,
            "no message": not error.startswith("Error: "),
            "does not name it": self.case.names not in error,
            "no remedy": not REMEDY.search(error),
            "Hydra's words": "HYDRA_FULL_ERROR" in error or "full_key" in error or "object_type" in error,
            "on standard output": bool(self.stdout),
            f"leaves {', '.join(self.left)}": bool(self.left),
        }
        return [problem for problem, is_so in found.items() if is_so]


# ---- the mistakes -------------------------------------------------------------------------------------------------


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Name, type and field of each setting in a dataclass of settings and in those that it holds."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        inner = [kind, *typing.get_args(kind)]
        (section,) = [x for x in inner if dataclasses.is_dataclass(x)][:1] or [None]
        if section is not None and typing.get_origin(kind) not in (list, dict):
            yield from leaves(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind, field


def of_types(schema: type, skip: Callable[[str], bool]) -> Iterator[tuple[str, str, str]]:
    """Overrides with a value of a wrong type or out of range, for each setting; and what they are about."""
    for name, kind, field in leaves(schema):
        if skip(name):
            continue
        kinds = {kind, *typing.get_args(kind)}
        origin = typing.get_origin(kind)
        if kinds & {int, float}:
            yield f"{name}=abc", name, "wrong type"
            yield f"{name}=[1]", name, "list for a scalar"
        if int in kinds and float not in kinds and origin is not list:
            yield f"{name}=1.5", name, "wrong type"
        if kind is bool:
            yield f"{name}=2", name, "wrong type"
            yield f"{name}=maybe", name, "wrong type"
        if origin in (list, dict):
            yield f"{name}=3", name, "scalar for a list"
        if str in kinds and origin is not list:
            yield f"{name}={{a:1}}", name, "list for a scalar"
        if kind in (int, float, bool, str) or origin in (list, dict):
            yield f"{name}=null", name, "null"
        if "range" in field.metadata:
            low, _ = field.metadata["range"]
            yield f"{name}={'nan' if float in kinds else low - 1}", name, "out of range"
            yield f"{name}=-3", name, "out of range"
            yield f"{name}={10**24}", name, "out of range"


def sections(schema: type, prefix: str = "") -> Iterator[str]:
    """Prefixes of the sections of a dataclass of settings, the empty one among them."""
    yield prefix
    for name in dict.fromkeys(name.rpartition(".")[0] for name, _, _ in leaves(schema)):
        if name:
            yield f"{name}."


SYNTAX = [
    ("model.layers={a", "model.layers={a"),
    ("training.steps", "training.steps"),
    ("training.steps=[1", "training.steps=[1"),
    ("=3", "=3"),
    ("training.steps=1=2)", "training.steps=1=2)"),
    ("training..steps=1", "training..steps=1"),
    ("training.steps='1", "training.steps='1"),
    ("training.steps=1,2", "training.steps"),
    ("training.sample_prompts=[a,b", "training.sample_prompts"),
    ("data.filespec=a b(c", "data.filespec"),
    ("~training.steps", "training.steps"),
    ("~training", "training"),
    ("+training.steps=3", "training.steps"),
    ("+training.step=3", "training.steps"),
    ("++training.step=3", "training.steps"),
    ("+models.layers=3", "models"),
    ("training.steps=${training.step}", "training.step"),
    ("training.steps=${nothing}", "nothing"),
    ("training.steps=${training.steps}", "training.steps"),
    ("training.steps=${oc.env:NO_SUCH}", "NO_SUCH"),
    ("training.steps=${nowhere:1}", "nowhere"),
    ("-training.steps=3", "training.steps"),
    ("--training.steps=3", "training.steps"),
    ("--confg-name=x", "--confg-name"),
    ("--config-dir={tmp}/none", "none"),
    ("--config-path={tmp}/none", "none"),
    ("--cfg=jobs", "jobs"),
    ("--info=none", "none"),
    ("train.py", "train.py"),
    ("\u202eevil=1", "evil"),
    ("training.größe=1", "größe"),
    ("training.steps=\x1b[31m3", "training.steps"),
]
"""Arguments that are not written as Hydra reads them, and what the message must contain."""

UNKNOWN = [
    ("training.step=1", "Did you mean training.steps?"),
    ("training.batchsize=1", "Did you mean training.batch_size?"),
    ("training.sed=1", "Did you mean training.seed?"),
    ("data.prefetsh=1", "Did you mean data.prefetch?"),
    ("modl.layers=2", "Did you mean model.layers?"),
    ("optimizer.lr=1", "optimizer.lr"),
    ("optimizer.learning_rat=1", "Did you mean optimizer.learning_rate?"),
    ("mesh.x=2", "mesh.x"),
    ("hardware.cache=x", "hardware.cache"),
    ("paths.root=x", "paths.root"),
    ("pipeline.shedule=gpipe", "Did you mean pipeline.schedule?"),
    ("distributed.timeout=3", "distributed.timeout"),
    ("model.layer=3", "Did you mean model.layers?"),
    ("model.rope_scaling.kin=linear", "model.rope_scaling"),
    ("trainin=3", "Did you mean training?"),
    ("steps=3", "Did you mean training.steps?"),
    ("batch_size=3", "Did you mean training.batch_size?"),
    ("training.steps.x=3", "training.steps"),
    ("training.x.y=3", "training.x"),
    ("optimizer=moun", "Did you mean muon?"),
    ("optimizer=adam", "Did you mean adamw?"),
    ("model=dmo", "Did you mean demo?"),
    ("mesh=fsdpt2", "Did you mean fsdp_t2?"),
    ("data=synthetc", "Did you mean synthetic?"),
    ("hardware=h201", "Did you mean h200?"),
    ("optimzer=adamw", "Did you mean optimizer?"),
    ("optimizer@x=adamw", "optimizer"),
    ("optimizer=null", "optimizer"),
    ("hydra/launcher=none", "hydra/launcher"),
    ("hydra.rum.dir=x", "hydra.rum"),
    ("data.mixture={a:{wieght:1}}", "data.mixture"),
    ("data.mixture.a.wieght=1", "wieght"),
    ("data.stream={fils:[a]}", "fils"),
    ("optimizer.groups=[{mach:x}]", "mach"),
    ("optimizer.groups=[{match:embd,rate:1}]", "Did you mean embed?"),
    ("optimizer.groups=[{match:layers.w_qq,rate:1}]", "Did you mean layers.w_q?"),
    ("optimizer.groups=[{match:embed,algorithm:moun}]", "Did you mean muon?"),
    ("optimizer.groups=[{match:embed,rate:-1}]", "optimizer.groups"),
    ("optimizer.groups=[{rate:1}]", "match"),
    ("optimizer.groups=[3]", "optimizer.groups"),
    ("optimizer.groups=[null]", "optimizer.groups"),
    ("optimizer.algorithm=moun", "Did you mean muon?"),
    ("optimizer.schedule=cosin", "Did you mean cosine?"),
    ("optimizer.decay_on=[matrx]", "Did you mean matrix?"),
    ("training.attention=einsun", "Did you mean einsum?"),
    ("training.save=mark", "Did you mean marked?"),
    ("training.gather_weights=layers", "Did you mean layer?"),
    ("training.compute_dtype=fp32", "Did you mean f32?"),
    ("training.eval_weights=weight", "Did you mean weights?"),
    ("training.eval_weights=ema", "training.eval_weights"),
    ("pipeline.schedule=gpip", "Did you mean gpipe?"),
    ("pipeline.schedule=none:main", "pipeline.schedule"),
    ("pipeline.schedule=json:none", "pipeline.schedule"),
    ("pipeline.layers_per_stage=balance", "Did you mean balanced?"),
    ("model.module=trian", "Did you mean train?"),
    ("model.module=models.gpt", "Did you mean models.gpt2?"),
    ("model.module=json", "model.module"),
    ("model.module=", "model.module"),
    ("model.module=a b", "model.module"),
    ("model.module=../x", "model.module"),
    ("model.module=.", "model.module"),
    ("model.module=3", "model.module"),
    ("model.module=null", "model.module"),
    ("distributed.devices=some", "distributed.devices"),
]
"""Names that are not there. The message has the nearest one."""

VALUES = [
    ("model=null", "model"),
    ("training=null", "training"),
    ("training=3", "training"),
    ("training=[1]", "training"),
    ("data=null", "data"),
    ("mesh=null", "mesh"),
    ("mesh.d=3 mesh.t=1", "mesh"),
    ("mesh.d=-1 mesh.t=-1", "mesh"),
    ("mesh.d=0", "mesh"),
    ("mesh.d=-2", "mesh"),
    ("mesh.d=1000000000", "mesh.d"),
    ("mesh.p=1000000000", "mesh.p"),
    ("mesh.t=8 mesh.d=1", "model.n_kv"),
    ("model.n_kv=3", "model.n_kv"),
    ("model.d_head=31", "model.d_head"),
    ("model.logit_softcap=0", "model.logit_softcap"),
    ("model.rope_scaling={kind:linar,factor:2}", "Did you mean linear?"),
    ("model.rope_scaling={factor:2}", "model.rope_scaling"),
    ("model.rope_scaling=3", "model.rope_scaling"),
    ("model.bos_id=-1", "model.bos_id"),
    ("model.bos_id=100000", "model.bos_id"),
    ("model.vocab=10", "vocab"),
    ("training.batch_size=63", "training.batch_size"),
    ("training.seq_len=63", "training.seq_len"),
    ("training.microbatches=7", "training.batch_size"),
    ("training.loss_chunk=7", "training.loss_chunk"),
    ("training.tokens=100000", "tokens"),
    ("training.steps=null", "steps"),
    ("training.steps=null training.tokens=3", "tokens"),
    ("training.steps=null training.epochs=nan", "training.epochs"),
    ("training.ema_decay=1", "training.ema_decay"),
    ("training.attention=cudnn", "cudnn"),
    ("training.sample_interval=10 training.sample_prompts=[3]", "sample_prompts"),
    ("training.init_from={tmp}/none", "none"),
    ("training.init_from=", "training.init_from"),
    ("optimizer.warmup_steps=1000", "optimizer.warmup_steps"),
    ("optimizer.schedule=wsd", "optimizer.cooldown_steps"),
    ("optimizer.schedule_steps=null", "optimizer.schedule_steps"),
    ("optimizer.groups=[{match:nothing*,rate:1}]", "nothing*"),
    ("optimizer.learning_rate=inf", "optimizer.learning_rate"),
    ("data.filespec={tmp}/none.zarr", "none.zarr"),
    ("data.filespec={tmp}", "{tmp}"),
    ("data.filespec=", "data.filespec"),
    ("data.filespec=null", "data.filespec"),
    ("data.filespec=nowhere://x", "nowhere"),
    ("data.filespec=http://127.0.0.1:1/x", "127.0.0.1"),
    ("data.filespec=/dev/null", "/dev/null"),
    ("data.filespec=/etc/passwd", "/etc/passwd"),
    ("data.filespec=s3://x/y", "s3"),
    ("data.mixture={a:{filespec:x,weight:1}}", "data.mixture"),
    ("+data.mixture={a:{filespec:x,weight:1}}", "data.filespec"),
    ("data.filespec=null +data.mixture={a:{filespec:{tmp}/none,weight:1}}", "none"),
    ("data.filespec=null +data.mixture={a:{filespec:x,weight:0}}", "weight"),
    ("data.filespec=null +data.mixture={a:{weight:1}}", "filespec"),
    ("data.filespec=null +data.mixture={a:null}", "data.mixture"),
    ("data.filespec=null +data.mixture={a:3}", "data.mixture"),
    ("data.filespec=null data.stream={files:[{tmp}/none.jsonl]}", "none.jsonl"),
    ("data.filespec=null data.stream={}", "data.stream"),
    ("data.filespec=null data.stream={files:[/etc/passwd],tokenizer:{tmp}/none}", "none"),
    ("data.max_epochs=0", "max_epochs"),
    ("pipeline.layers_per_stage=[0,1]", "pipeline.layers_per_stage"),
    ("pipeline.layers_per_stage=3", "pipeline.layers_per_stage"),
    ("mesh.p=2 mesh.d=2 pipeline.virtual_stages=3", "layers"),
    ("mesh.p=2 mesh.d=2 model.layers=3", "layers"),
    ("hardware.memory_fraction=0", "hardware.memory_fraction"),
    ("hardware.memory_fraction=2", "hardware.memory_fraction"),
    ("hardware.compiler_options={--xla_x:1}", "xla_x"),
    ("hardware.compiler_options={xla_cpu_enable_fast_math:[1]}", "hardware.compiler_options"),
    ("hardware.environment={A:null}", "hardware.environment"),
    ("hardware.environment={'A=B':c}", "hardware.environment"),
    ("distributed.count=2", "distributed"),
    ("distributed.id=3", "distributed"),
    ("distributed.coordinator=x distributed.count=2 distributed.id=0", "distributed.coordinator"),
    ("distributed.auto=true", "distributed"),
    ("paths.model_name=", "paths.model_name"),
    ("--config-name=local_test_synth", "Did you mean local_test_synthetic?"),
    ("--config-name=local_tst_pipeline", "Did you mean local_test_pipeline?"),
    ("--config-name=gpt2", "Did you mean gpt2_124m?"),
    ("--config-name=../x", "../x"),
    ("--config-name={tmp}/x", "x"),
    ("--config-name=model/demo", "--config-name"),
    ("--config-name=base", "model"),
    ("--config-name=", "--config-name"),
    ("--config-name", "config-name"),
    ("--multirun training.step=1,2", "Did you mean training.steps?"),
    ("--multirun optimizer=adamw,moun", "Did you mean muon?"),
    ("--multirun paths.model_name=a,b", "paths.model_name"),
]
"""Values that are refused, and what the message must contain."""

SIZES = [
    ("training.batch_size=1000000000", "training.batch_size"),
    ("training.batch_size=4611686018427387904", "training.batch_size"),
    ("training.batch_size=1048576 training.seq_len=65536", "training.batch_size"),
    ("training.seq_len=1000000000000", "training.seq_len"),
    ("training.seq_len=1048576", "training.seq_len"),
    ("training.microbatches=1000000", "training.microbatches"),
    ("training.eval_batches=1000000000000", "training.eval_batches"),
    ("training.sample_tokens=1000000000", "training.sample_tokens"),
    ("training.sample_top_k=1000000000000", "training.sample_top_k"),
    ("training.keep_checkpoints=100000000000", "training.keep_checkpoints"),
    ("training.unroll=100000000000", "training.unroll"),
    ("training.steps=1000000000000000", "training.steps"),
    ("training.tokens=4611686018427387904 training.steps=null", "training.tokens"),
    ("data.prefetch=100000000000", "data.prefetch"),
    ("data.prefetch=1000000000", "data.prefetch"),
    ("data.cache_bytes=4611686018427387904", "data.cache_bytes"),
    ("model.layers=1000000000", "model.layers"),
    ("model.layers=10000", "memory"),
    ("model.vocab=1099511627776", "model.vocab"),
    ("model.vocab=1073741824", "memory"),
    ("model.d_model=1048576", "memory"),
    ("model.d_ff=1000000000000", "model.d_ff"),
    ("model.d_head=1000000000000", "model.d_head"),
    ("model.n_kv=1000000000000", "model.n_kv"),
    ("model.n_q_per_kv=1000000000000", "model.n_q_per_kv"),
    ("mesh.r=4611686018427387904", "mesh.r"),
    ("mesh.t=1000000000", "mesh.t"),
    ("mesh=pipeline training.microbatches=1000000 training.batch_size=8000000", "training"),
    ("mesh=pipeline pipeline.virtual_stages=1000000000", "pipeline.virtual_stages"),
    ("optimizer.muon_iterations=1000000000 optimizer=muon", "optimizer.muon_iterations"),
    ("distributed.join_timeout=1000000000000", "distributed.join_timeout"),
    ("hardware.simulated_devices=1000000000", "hardware.simulated_devices"),
]
"""Sizes that no run has."""

OF_TOOLS = {
    "tools.generate": [
        ("run={tmp}/none", "none"),
        ("run=", "run"),
        ("promt=a", "Did you mean prompt?"),
        ("max_tokens=1000000000000", "max_tokens"),
        ("max_tokens=0", "max_tokens"),
        ("samples=1000000000000", "samples"),
        ("batch=1000000000000", "batch"),
        ("top_k=0", "top_k"),
        ("top_p=2", "top_p"),
        ("temperature=-1", "temperature"),
        ("seed=-1", "seed"),
        ("step=-1", "step"),
        ("context=1", "context"),
        ("mesh.d=1000000000", "mesh.d"),
        ("gather_weights=stp", "Did you mean step?"),
        ("weights=em", "Did you mean ema?"),
        ("prompts=[a]", "prompts"),
        ("prompts_file={tmp}/x", "prompts_file"),
        ("--config-name=generat", "Did you mean generate?"),
    ],
    "tools.checkpoint_to_huggingface": [
        ("run={tmp}/none", "none"),
        ("dtype=fp32", "Did you mean f32?"),
        ("weights=em", "Did you mean ema?"),
        ("output={tmp}", "output"),
        ("file_bytes=0", "file_bytes"),
        ("step=-1", "step"),
    ],
    "tools.huggingface_to_checkpoint": [
        ("model={tmp}", "config.json"),
        ("model={tmp}/none", "none"),
        ("model=a/b/c/d", "a/b/c/d"),
        ("bos_id=-1", "model"),
        ("modul=train", "Did you mean module?"),
        ("ignore=3", "ignore"),
    ],
    "tools.huggingface_to_flat_tokens": [
        ("train.files=[{tmp}/none.jsonl]", "none.jsonl"),
        ("train.files=[{tmp}/*.jsonl]", "*.jsonl"),
        ("train.files=[/etc/passwd]", "/etc/passwd"),
        ("tokenizer.kind=byte", "Did you mean bytes?"),
        ("tokenizer.kind=hugingface", "Did you mean huggingface?"),
        ("tokenizer.kind=huggingface", "tokenizer.name"),
        ("tokenizer.kind=tiktoken tokenizer.name=cl100k", "cl100k"),
        ("tokenizer.backend=fast", "tokenizer.backend"),
        ("tokenizer.vocab_size=3 tokenizer.kind=train_bpe", "tokenizer.vocab_size"),
        ("num_workers=1000000000", "num_workers"),
        ("num_workers=0", "num_workers"),
        ("shard=3", "shard"),
        ("shard=4/4", "shard"),
        ("shard=0/1000000000000", "shard"),
        ("train=null", "train"),
        ("dataset=x train.files=[]", "train.source"),
        ("--config-name=austen_byte", "Did you mean austen_bytes?"),
        ("train.file=[a]", "Did you mean train.files?"),
        ("train.files=a", "train.files"),
        ("tokenizer.end_token=[]", "tokenizer.end_token"),
    ],
    "tools.inspect_data": [
        ("filespec={tmp}/none.zarr", "none.zarr"),
        ("filespec=null", "filespec"),
        ("filespec=null run={tmp}/none", "none"),
        ("split=trian", "Did you mean train?"),
        ("document=100000000", "document"),
        ("step=3", "step"),
        ("rows=0", "rows"),
        ("first_row=-1 step=1", "first_row"),
        ("characters=0", "characters"),
        ("sample=1000000000000000", "sample"),
        ("documents=1000000000000000", "documents"),
        ("filspec=x", "Did you mean filespec?"),
    ],
    "tools.merge_flat_tokens": [
        ("out={tmp}/x.zarr", "x.zarr"),
        ("ot=x", "Did you mean out?"),
        ("overwrite=2", "overwrite"),
    ],
    "tools.write_synthetic_dataset": [
        ("train_tokens=0", "train_tokens"),
        ("train_tokens=1000000000000000", "train_tokens"),
        ("validation_tokens=1000000000000000", "validation_tokens"),
        ("max_digits=1000000000000", "max_digits"),
        ("max_length=1000000000000", "max_length"),
        ("max_components=1000000000000", "max_components"),
        ("max_sigma=0.5", "max_sigma"),
        ("out=/proc/x.zarr", "/proc/x.zarr"),
        ("sed=1", "Did you mean seed?"),
    ],
    "tools.compare": [
        ("runs=null", "runs"),
        ("runs=[]", "runs"),
        ("runs={tmp}/none", "none"),
        ("runs={a:1}", "runs"),
        ("output=x.gif", "output"),
        ("smooth=0", "smooth"),
        ("sort=speed", "none"),
        ("run=x", "Did you mean runs?"),
    ],
    "tools.schedule": [
        ("schedule=gpip", "Did you mean gpipe?"),
        ("schedule=3", "schedule"),
        ("p=0", "p is 0"),
        ("m=0", "m is 0"),
        ("v=0", "v is 0"),
        ("p=1000000000", "p is 1000000000"),
        ("m=1000000000", "m is 1000000000"),
        ("m=1000000", "m is 1000000"),
        ("v=1000000000 schedule=interleaved_1f1b", "v is 1000000000"),
        ("model=tick", "Did you mean ticks?"),
        ("output=x.gif", "output"),
        ("forward=abc", "forward"),
        ("forward=[1]", "forward"),
        ("transfer=-1", "transfer"),
        ("input_bytes=3XB", "input_bytes"),
        ("shedule=x", "Did you mean schedule?"),
    ],
}
"""Values and names that a tool refuses."""

VERIFY = [
    ("verify.device=3", "Did you mean verify.devices?"),
    ("verify.devices=1", "verify.devices"),
    ("verify.devices=100000", "verify.devices"),
    ("verify.meshes=[2x2]", "2x2"),
    ("verify.meshes=[axb]", "axb"),
    ("verify.precisions=[f32]", "verify.precisions"),
    ("verify.tolerance=0", "verify.tolerance"),
    ("training.step=3", "Did you mean training.steps?"),
    ("training.batch_size=0", "training.batch_size"),
    ("model.module=trian", "Did you mean train?"),
    ("--config-name=local_test_synth", "Did you mean local_test_synthetic?"),
    ("optimizer=moun", "Did you mean muon?"),
    ("verify.small=3", "verify.small"),
]


def cases() -> list[Case]:
    """All mistakes."""
    from training_io.config import Config  # train's settings; imports jax

    found: list[Case] = []

    def add(program: str, base: Sequence[str], text: str, names: str, kind: str, split: bool = True) -> None:
        own = re.split(r" (?=\+?[\w.]+=|--)", text) if split else [text]
        given = {argument.partition("=")[0] for argument in own}
        kept = [argument for argument in base if argument.partition("=")[0] not in given]
        flags = [argument for argument in own if argument.startswith("--")]
        kept = [*kept, *flags] if split else kept
        rest = [argument for argument in own if not (split and argument in flags)]
        found.append(Case(program, (*kept, *rest), names, kind))

    listed = (("unknown name", UNKNOWN), ("value", VALUES), ("size", SIZES))
    for kind, table in listed:
        for text, names in table:
            add("train", RUN, text, names, kind)
    for text, names in SYNTAX:
        add("train", RUN, text, names, "syntax", split=False)
    found.append(Case("train", (), "--config-name", "value"))
    found.append(Case("train", ("training.steps=3",), "--config-name", "value"))
    # Model settings have types only in their own module; Any takes everything.
    for text, names, kind in of_types(Config, lambda name: name == "model"):
        add("train", RUN, text, names, kind)
    model = import_module("train").ModelConfig
    for text, names, kind in of_types(model, lambda name: name == "module" or name.startswith("rope_scaling")):
        add("train", RUN, f"model.{text}", f"model.{names}", kind)
    for section in sections(Config):
        add("train", RUN, f"{section}bogus_name=1", "bogus_name", "unknown name")
    for text, names in VERIFY:
        add("tools.verify", RUN, text, names, "tool")
    for program, base in TOOLS.items():
        for text, names in OF_TOOLS[program]:
            add(program, base, text, names, "tool")
        for text, names in SYNTAX[:3]:
            setting = base[0].partition("=")[0]
            add(program, base, text.replace("model.layers", setting), names.split("=")[-1], "syntax", split=False)
        module = "config" if program.endswith("huggingface_to_flat_tokens") else "__main__"
        folder = (ROOT / program.replace(".", "/")).is_dir()
        schema = import_module(f"{program}.{module}" if folder else program).Config
        for text, names, kind in of_types(schema, lambda name: False):
            add(program, base, text, names, kind)
        add(program, base, "bogus_name=1", "bogus_name", "unknown name")
        required = base[0].partition("=")[0]
        found.append(Case(program, (), required, "missing"))
    return list(dict.fromkeys(found))


# ---- running them -------------------------------------------------------------------------------------------------


def run(chosen: Sequence[Case], seconds: float = SECONDS) -> Iterator[Outcome]:
    """Runs the commands one after the other, each in a forked process."""
    for program in {case.program: None for case in chosen}:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(program if not (ROOT / program.replace(".", "/")).is_dir() else f"{program}.__main__")
    for case in chosen:
        with tempfile.TemporaryDirectory(prefix="bad_settings_") as parent:
            yield _run(case, Path(parent), seconds)


def _run(case: Case, parent: Path, seconds: float) -> Outcome:
    directory = parent / "here"
    directory.mkdir()
    arguments = [argument.replace("{tmp}", str(directory)) for argument in case.arguments]
    case = dataclasses.replace(case, names=case.names.replace("{tmp}", str(directory)))
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork before JAX has started its devices is safe
        child = os.fork()
    if child == 0:
        _become(case.program, arguments, parent, directory)
    status = None
    while time.monotonic() < begin + seconds:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    texts = [(parent / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    left = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))[:5]
    shutil.rmtree(directory, ignore_errors=True)
    return Outcome(case, status, *texts, left, time.monotonic() - begin)


def _become(program: str, arguments: list[str], parent: Path, directory: Path) -> typing.NoReturn:
    """Runs the program in this process, which ends."""
    code = 1
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(parent / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(directory)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(parent / "cache")
        sys.argv = [program, *arguments]
        warnings.filterwarnings("ignore", module="runpy")
        try:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(wanted: Sequence[str]) -> int:
    """Runs the cases of which `wanted` has the kind or a part of the command, or all. Returns the exit status."""
    chosen = [case for case in cases() if not wanted or any(text in str(case) or text == case.kind for text in wanted)]
    counts: dict[str, list[int]] = {}
    bad = 0
    for outcome in run(chosen):
        problems = outcome.problems()
        count = counts.setdefault(outcome.case.kind, [0, 0])
        count[0] += 1
        if problems:
            bad += 1
            count[1] += 1
            print(f"{outcome.case}\n  {'; '.join(problems)} ({outcome.seconds:.1f} s)")
            for line in outcome.stderr.splitlines()[:4] + outcome.stderr.splitlines()[4:][-3:]:
                print(f"    {line[:300]}")
            sys.stdout.flush()
    for kind, (number, wrong) in counts.items():
        print(f"{kind:20} {number:4} mistakes, {number - wrong:4} answered in one message")
    print(f"{len(chosen)} mistakes, {bad} answered badly")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
