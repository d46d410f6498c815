"""Files of strangers, read by each tool: what is no file, is too long, too deep or of another type
gets one line.
"""

import io
import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import zarr
from rich.console import Console
from safetensors.numpy import save_file

from shardwright.data.loader import DataConfig
from shardwright.data.text import definitions
from shardwright.data.text.tokenizers import open_tokenizer, tokenizer_of_run
from shardwright.data.untrusted import MEMORY, refused
from shardwright.program.files import read_config
from shardwright.program.resume import trusted_options
from shardwright.tools import huggingface_to_checkpoint, inspect_data
from shardwright.tools.generate import Settings, read_prompts
from tests.support import tiny
from tests.support.written_datasets import write

QUIET = Console(file=io.StringIO())
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_waiting():
    """A test that waits, for a pipe for example, fails."""

    def late(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset with a BPE, a model, and files of a run."""
    home = tmp_path_factory.mktemp("made")
    bpe = definitions.train_bpe(["It is a truth universally acknowledged"], 270)
    attributes = {"tokenizer": {"kind": "train_bpe", "end_token": "<|end|>"}}
    write(home / "data", attributes=attributes)
    (home / "data/tokenizer.json").write_text(bpe)
    shutil.copytree(ROOT / "tests/data/seqax_synthetic_dataset.zarr", home / "seqax")
    model = home / "model"
    model.mkdir()
    config = {"model_type": "llama", "bos_token_id": 0, "eos_token_id": 1}
    config |= {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(bpe)
    save_file({"x": np.zeros(3, np.float32)}, model / "model.safetensors")
    (home / "config.yaml").write_text("model: {}\n")
    (home / "text").write_text("{}\n")
    return home


@pytest.fixture
def home(made, tmp_path):
    """A copy, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "home"))


def inspect(path):
    inspect_data.run(inspect_data.Settings(filespec=str(path)), QUIET)


def an_import(home):
    given = {"model": str(home / "model"), "output": str(home / "out"), "check": False}
    huggingface_to_checkpoint.run(huggingface_to_checkpoint.Settings(**given), QUIET.print)


def of_dataset(path):
    return tokenizer_of_run(DataConfig(filespec=str(path)))


def prompts(home):
    return read_prompts(Settings(prompts_file=str(home / "text")))


# by the file, what reads it
READERS = {
    "data/tokenizer.json": lambda home: of_dataset(home / "data"),
    "data/train/zarr.json": lambda home: inspect(home / "data"),
    "data/train/encoded_tokens/zarr.json": lambda home: inspect(home / "data"),
    "data/train/encoded_tokens/c/0": lambda home: inspect(home / "data"),
    "seqax/train/encoded_tokens/.zarray": lambda home: inspect(home / "seqax"),
    "seqax/train/encoded_tokens/0": lambda home: inspect(home / "seqax"),
    "model/tokenizer.json": lambda home: open_tokenizer("huggingface", str(home / "model")),
    "model/config.json": an_import,
    "model/model.safetensors": an_import,
    "config.yaml": lambda home: read_config(home / "config.yaml"),
    "text": prompts,
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DEEP = '{"model": ' + "[" * 10**5 + "]" * 10**5 + "}"


def replace(path, make):
    path.unlink()
    make(path)


DAMAGES = {
    "a pipe": lambda path: replace(path, os.mkfifo),
    "one TiB": lambda path: os.truncate(path, 2**40),  # which takes no room on the disk
    "deep": lambda path: path.write_text(DEEP),
    "a device": lambda path: replace(path, lambda path: path.symlink_to("/dev/zero")),
    "a loop": lambda path: replace(path, lambda path: path.symlink_to(path)),
    "a pointer": lambda path: path.write_text(POINTER),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_none_gets_a_line_with_its_name(made, home, name):
    for damage, make in DAMAGES.items():
        make(home / name)
        if (name, damage) == ("text", "deep"):
            assert prompts(home) == [DEEP]
        else:
            with pytest.raises(ValueError, match=r"\w") as error:
                READERS[name](home)
            message = str(error.value)
            assert "\n" not in message
            parts = Path(name).parts  # a chunk that is JSON is damaged: its array is named
            named = {*re.findall(r"[.\w]+", message)}
            assert {parts[-1], *parts[-3:-1], "model"} & named, (damage, message)
            assert len(message) < 700
            if damage == "a pointer":
                assert re.search(f"{name} is a pointer of git lfs.* Run `git lfs pull`", message)
        replace(home / name, lambda path: shutil.copy(made / name, path))


@pytest.mark.parametrize("shard", [True, False])
def test_a_file_for_which_memory_has_no_room_is_refused_however_large_its_chunks_are(home, shard):
    array = home / "data/train/encoded_tokens"
    about = json.loads((array / "zarr.json").read_text())
    about["chunk_grid"]["configuration"]["chunk_shape"] = [2**40 if shard else 2**30]
    if not shard:
        about["codecs"] = about["codecs"][0]["configuration"]["codecs"][:1]
    (array / "zarr.json").write_text(json.dumps(about))
    os.truncate(array / "c/0", MEMORY // 2 + 1)
    with pytest.raises(ValueError, match=r"c/0 cannot be read: it has .* bytes, more than"):
        inspect(home / "data")


@pytest.mark.parametrize("field", ["compressor", "filters"])
def test_no_pickle_of_a_dataset_is_loaded(home, field):
    """Of which zarr v2 has a codec."""
    path = home / "seqax/train/seq_starts/.zarray"
    about, codec = json.loads(path.read_text()), {"id": "pickle", "protocol": 4}
    given = codec if field == "compressor" else [*about["filters"], codec]
    path.write_text(json.dumps(about | {"compressor": None} | {field: given}))
    (path.parent / "0").write_bytes(pickle.dumps(print))
    message = r"seq_starts is missing or cannot be read: .*(pickle|too many)"
    with pytest.raises(ValueError, match=message):
        inspect(home / "seqax")


@pytest.mark.parametrize("name", ["data/train/encoded_tokens/zarr.json", [*READERS][4]])
def test_chunks_that_no_memory_holds_are_refused(home, name):
    path, shape = home / name, r'("chunks": \[|"chunk_shape":\s*\[)\s*\d+'
    path.write_text(re.sub(shape, rf"\g<1>{2**40}", path.read_text()))
    with pytest.raises(ValueError, match=r"has chunks of 1099511627776 elements, more than memory"):
        inspect(home / name.partition("/")[0])


WRONG = [("tokenizer", value) for value in (5, {"kind": None}, {"kind": "bytes", "end_token": 5})]
WRONG += [(name, True) for name in ("source", "max_token_id", "num_tokens", "num_documents")]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_attributes_of_a_dataset_have_a_type(tmp_path, name, value):
    dataset = write(tmp_path / "data")
    zarr.open_group(dataset, path="train", mode="r+").attrs[name] = value
    message = rf"^[^\n]*{dataset}[^\n]*{name}(\.\w+)? is .*; it must be an? \w+[^\n]*$"
    for read in [inspect, of_dataset] if name == "tokenizer" else [inspect]:
        with pytest.raises(ValueError, match=message):
            read(dataset)


def test_options_of_xla_that_are_texts_need_trust():
    """Such as a directory that XLA writes into, or takes its assembler from."""
    c, said = tiny.config(), []
    c.hardware.compiler_options = {"xla_dump_to": "/tmp", "xla_cpu_use_fusion_emitters": False}
    assert trusted_options(c, False, said.append) == {"xla_cpu_use_fusion_emitters": False}
    assert "the run's option xla_dump_to is ignored; give trust=true to use it" in said[0]
    assert len(trusted_options(c, True, said.append)) == 2


class PanicException(BaseException):
    """As pyo3 names a panic."""


@pytest.mark.quick
def test_what_libraries_raise_is_one_line():
    once = r"^it is none: no\. Do x\.$"
    for error in (RuntimeError("no\n\nLocation:\n  x.rs:1"), PanicException("no"), OSError("no")):
        with pytest.raises(ValueError, match=once), refused("it is none", "Do x."):
            raise error
    for kind in (KeyboardInterrupt, SystemExit, ImportError):
        with pytest.raises(kind), refused("it is none"):
            raise kind
