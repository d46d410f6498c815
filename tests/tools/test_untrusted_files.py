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

from shardwright.data.loader import DataConfig
from shardwright.data.text import definitions
from shardwright.data.text.tokenizers import open_tokenizer, tokenizer_of_run
from shardwright.data.untrusted import MEMORY, check_types, read_file, read_object, refused
from shardwright.program.files import read_config
from shardwright.program.resume import trusted_options
from shardwright.tools import huggingface_to_checkpoint, inspect_data
from shardwright.tools.generate import Settings, read_prompts
from tests.support import tiny
from tests.support.written_datasets import write

QUIET = Console(file=io.StringIO())
DEEP = "[" * 10**5 + "]" * 10**5
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
def given(tmp_path_factory):
    """A dataset with a BPE, a model, and files of a run."""
    from safetensors.numpy import save_file

    home = tmp_path_factory.mktemp("given")
    bpe = definitions.train_bpe(["It is a truth universally acknowledged"], 270)
    dataset = write(
        home / "data", attributes={"tokenizer": {"kind": "train_bpe", "end_token": "<|end|>"}}
    )
    (Path(dataset) / "tokenizer.json").write_text(bpe)
    shutil.copytree(ROOT / "tests/data/seqax_synthetic_dataset.zarr", home / "seqax")
    model = home / "model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "bos_token_id": 0,
    }
    config |= {"num_hidden_layers": 1, "intermediate_size": 8, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(bpe)
    save_file({"x": np.zeros(3, np.float32)}, model / "model.safetensors")
    (home / "config.yaml").write_text("model: {}\n")
    (home / "text").write_text("{}\n")
    return home


def inspect(**settings):
    inspect_data.run(inspect_data.Settings(**settings), QUIET)


def an_import(home):
    settings = huggingface_to_checkpoint.Settings(
        model=str(home / "model"), output=str(home / "out"), check=False
    )
    huggingface_to_checkpoint.run(settings, QUIET.print)


def of_dataset(path):
    return tokenizer_of_run(DataConfig(filespec=str(path)))


READERS = {
    "a tokenizer": (
        "data/tokenizer.json",
        lambda home: open_tokenizer("huggingface", str(home / "data")),
    ),
    "generate, its tokenizer": ("data/tokenizer.json", lambda home: of_dataset(home / "data")),
    "generate, its data": ("data/train/zarr.json", lambda home: of_dataset(home / "data")),
    "generate, its prompts": (
        "text",
        lambda home: read_prompts(Settings(prompts_file=str(home / "text"))),
    ),
    "inspect_data, a split": (
        "data/train/zarr.json",
        lambda home: inspect(filespec=str(home / "data")),
    ),
    "inspect_data, an array": (
        "data/train/encoded_tokens/zarr.json",
        lambda home: inspect(filespec=str(home / "data")),
    ),
    "inspect_data, tokens": (
        "data/train/encoded_tokens/c/0",
        lambda home: inspect(filespec=str(home / "data")),
    ),
    "seqax, an array": (
        "seqax/train/encoded_tokens/.zarray",
        lambda home: inspect(filespec=str(home / "seqax")),
    ),
    "seqax, tokens": (
        "seqax/train/encoded_tokens/0",
        lambda home: inspect(filespec=str(home / "seqax")),
    ),
    "import, config": ("model/config.json", an_import),
    "import, weights": ("model/model.safetensors", an_import),
    "a configuration": ("config.yaml", lambda home: read_config(home / "config.yaml")),
}


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path):
    """One TiB that takes no room on the disk."""
    os.truncate(path, 2**40)


def loop(path):
    path.unlink()
    path.symlink_to(path)


def deep(path):
    path.write_text('{"model": ' + DEEP + "}")


# A device is no file, as a pipe is, and a loop cannot be opened, whoever reads: one reads text, the
# other chunks.
DAMAGES = {pipe: READERS, sparse: READERS, deep: READERS} | dict.fromkeys(
    (device, loop), ("a tokenizer", "inspect_data, tokens")
)


@pytest.mark.parametrize(
    ("damage", "reader"), [(damage, name) for damage in DAMAGES for name in DAMAGES[damage]]
)
def test_a_file_that_is_none_gets_a_line_with_its_name(given, tmp_path, reader, damage):
    home = tmp_path / "home"
    shutil.copytree(given, home)
    name, read = READERS[reader]
    damage(home / name)
    if reader == "generate, its prompts" and damage is deep:
        assert len(read(home)) == 1
        return
    with pytest.raises(ValueError, match=r"\w") as error:
        read(home)
    message = str(error.value)
    assert "\n" not in message
    parts = Path(name).parts  # a chunk that is JSON is damaged, not foreign: its array is named
    assert {parts[-1], *parts[-3:-1], "model"} & {*re.findall(r"[.\w]+", message)}, message
    assert len(message) < 700


@pytest.mark.parametrize("reader", READERS)
def test_a_pointer_of_git_lfs_is_named(given, tmp_path, reader):
    home = tmp_path / "home"
    shutil.copytree(given, home)
    name, read = READERS[reader]
    (home / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )
    with pytest.raises(ValueError, match=f"{name} is a pointer of git lfs.* Run `git lfs pull`"):
        read(home)


@pytest.mark.parametrize("shard", [True, False])
def test_a_file_for_which_memory_has_no_room_is_refused_however_large_its_chunks_are(
    given, tmp_path, shard
):
    shutil.copytree(given / "data", tmp_path / "data")
    array = tmp_path / "data/train/encoded_tokens"
    about = json.loads((array / "zarr.json").read_text())
    about["chunk_grid"]["configuration"]["chunk_shape"] = [2**40 if shard else 2**30]
    about["codecs"] = (
        about["codecs"] if shard else about["codecs"][0]["configuration"]["codecs"][:1]
    )
    (array / "zarr.json").write_text(json.dumps(about))
    os.truncate(array / "c/0", MEMORY // 2 + 1)
    with pytest.raises(ValueError, match=r"c/0 cannot be read: it has .* bytes, more than"):
        inspect(filespec=str(tmp_path / "data"))


@pytest.mark.parametrize("field", ["compressor", "filters"])
def test_no_pickle_of_a_dataset_is_loaded(given, tmp_path, field):
    """Of which zarr v2 has a codec."""
    shutil.copytree(given / "seqax", tmp_path / "data")
    path = tmp_path / "data/train/seq_starts/.zarray"
    about, codec = json.loads(path.read_text()), {"id": "pickle", "protocol": 4}
    about |= {
        "compressor": None,
        field: codec if field == "compressor" else [*about["filters"], codec],
    }
    path.write_text(json.dumps(about))
    (tmp_path / "data/train/seq_starts/0").write_bytes(pickle.dumps(print))
    with pytest.raises(
        ValueError, match=r"seq_starts is missing or cannot be read: .*(pickle|too many)"
    ):
        inspect(filespec=str(tmp_path / "data"))


@pytest.mark.parametrize(
    "name", ["data/train/encoded_tokens/zarr.json", "seqax/train/encoded_tokens/.zarray"]
)
def test_chunks_that_no_memory_holds_are_refused(given, tmp_path, name):
    dataset, shape = tmp_path / "data", r'("chunks": \[|"chunk_shape":\s*\[)\s*\d+'
    shutil.copytree(given / name.partition("/")[0], dataset)
    path = dataset / name.partition("/")[2]
    path.write_text(re.sub(shape, rf"\g<1>{2**40}", path.read_text()))
    with pytest.raises(ValueError, match=r"has chunks of 1099511627776 elements, more than memory"):
        inspect(filespec=str(dataset))


WRONG = [("tokenizer", value) for value in (5, {"kind": None}, {"kind": "bytes", "end_token": 5})]
WRONG += [(name, True) for name in ("source", "max_token_id", "num_tokens", "num_documents")]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_attributes_of_a_dataset_have_a_type(tmp_path, name, value):
    dataset = write(tmp_path / "data")
    zarr.open_group(dataset, path="train", mode="r+").attrs[name] = value
    for read in [
        lambda path: inspect(filespec=path),
        *([of_dataset] if name == "tokenizer" else []),
    ]:
        with pytest.raises(ValueError, match=rf"{name}(\.\w+)? is .*; it must be an? \w+") as error:
            read(dataset)
        assert str(dataset) in str(error.value)
        assert "\n" not in str(error.value)


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
    for error in (RuntimeError("no\n\nLocation:\n  x.rs:1"), PanicException("no"), OSError("no")):
        with (
            pytest.raises(ValueError, match=r"^it is none: no\. Do x\.$"),
            refused("it is none", "Do x."),
        ):
            raise error
    for kind in (KeyboardInterrupt, SystemExit, ImportError):
        with pytest.raises(kind), refused("it is none"):
            raise kind


@pytest.mark.quick
def test_types():
    kinds = {
        "a": int,
        "b?": str | None,
        "c?": [{"x": float}],
        "d?": {str: bool},
        "e?": [(int, str)],
    }
    for right in (
        {"a": 1},
        {"a": 1, "b": None, "c": [{"x": 1}, {"x": 2.5, "y": 0}], "d": {"k": True}, "e": [[1, "x"]]},
    ):
        check_types("it", right, kinds)
    for wrong, message in (
        ({}, "it: a is missing; it must be a whole number. "),
        ({"a": True}, "it: a is True; it must be a whole number. "),
        ({"a": 1, "b": 2}, "it: b is 2; it must be a text or null. "),
        ({"a": 1, "c": [{"x": "y"}]}, "it: c.x is 'y'; it must be a number. "),
        ({"a": 1, "d": {"k": 0}}, "it: d.k is 0; it must be true or false. "),
        ({"a": 1, "e": [[1]]}, r"it: e is \[1\]; it must be a list of 2. "),
        ([], r"it is \[\]; it must be an object. "),
    ):
        with pytest.raises(ValueError, match=message):
            check_types("it", wrong, kinds)


@pytest.mark.quick
def test_a_missing_file_is_told_from_a_bad_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    with pytest.raises(ValueError, match="cannot be read: it is a directory"):
        read_file(tmp_path)
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbf{}")
    assert read_object(tmp_path / "x") == {}
    with pytest.raises(ValueError, match="it has 5 bytes, more than the limit of 4"):
        read_file(tmp_path / "x", 4)
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="x cannot be read: it is not UTF-8"):
        read_object(tmp_path / "x")
