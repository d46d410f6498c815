"""A run with a witness: what stands in each batch on the devices of this process, as its step gets it.

It is in <run>/witness_<process>.jsonl. With PAUSE_AT=<step> in the environment the run stops there, to be killed.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import jax
import numpy as np


class RecordedStep:
    """A compiled training step that first writes down which rows it is given: step, and a hash of each row."""

    def __init__(self, compiled, directory: Path):
        self._compiled, self._directory = compiled, directory

    def __getattr__(self, name: str):
        return getattr(self._compiled, name)

    def __call__(self, state, batch, step):
        line = {"step": int(step), "rows": rows_on_devices(batch)}
        with (self._directory / f"witness_{jax.process_index()}.jsonl").open("a") as file:
            print(json.dumps(line), file=file, flush=True)
        if int(step) == int(os.environ.get("PAUSE_AT", -1)):
            time.sleep(3600)
        return self._compiled(state, batch, step)


def hash_of(*parts: np.ndarray) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def rows_on_devices(batch) -> dict[str, str]:
    """Hash of each row of the batch that a device of this process holds, by its number in the whole batch.

    All devices that hold a row have the same, whole one; or else its hash is "differs".
    """
    found: dict[str, str] = {}
    fields = [{s.device: s for s in x.addressable_shards} for x in (batch.targets, batch.is_seq_start, batch.loss_mask)]
    for device, first in fields[0].items():
        blocks = [np.asarray(field[device].data) for field in fields]
        count, size, length = batch.targets.shape
        begin = first.index[1].indices(size)[0]
        whole = all(block.shape[::2] == (count, length) for block in blocks)
        for k, microbatch in enumerate(zip(*blocks, strict=True)):
            for i, row in enumerate(zip(*microbatch, strict=True)):
                name, number = hash_of(*row) if whole else "differs", str(k * size + begin + i)
                if found.setdefault(number, name) != name:
                    found[number] = "differs"
    return found


def record(run_files):
    """What is to take the place of `compile_step` in shardwright.run.run: the same, with a RecordedStep."""
    compile_step = run_files.compile_step

    def compile_and_record(lowered, directory, options):
        compiled, _ = compile_step(lowered, directory, options)
        return RecordedStep(compiled, Path(directory)), None  # no text: nothing is drawn

    return compile_and_record
