"""Inputs beside the tokens: arrays of a dataset that a model reads, from file to loss, against
numpy indexing. A model's step with one: test_changing.py.
"""

import dataclasses
import importlib
import json
import shutil

import jax
import numpy as np
import pytest
import zarr

import train
from shardlib.shardtypes import f32, u32
from shardwright.data import flat_tokens
from shardwright.data.loader import DataConfig, make_loader
from shardwright.modeling.model import Tokens, load_model
from tests.support import tiny
from tests.support.losses_of_runs import losses as losses_of
from tests.support.numpy_checks import check_modules
from tests.support.recipes import RECIPES

assert RECIPES  # importing it makes the programs of docs/recipes importable
check_modules(flat_tokens)

SEQ_LEN, KINDS = 10, 8


def write(path, seed=0, documents=60, split="train"):
    """`(path, ids, values)` of a split, with inputs: a kind below KINDS, a float's bits, 3 floats."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, documents)
    ids = rng.permutation(int(lengths.sum())) + 1
    with flat_tokens.Writer(str(path), split) as writer:
        writer.append(ids, lengths)
    kind = rng.integers(1, KINDS, ids.size).astype(np.uint32)
    weight = rng.random(ids.size, np.float32).view(np.uint32)
    flat_tokens.add_input(str(path), split, "kind", kind)
    flat_tokens.add_input(str(path), split, "weight", weight)
    pose = rng.random((ids.size, 3), np.float32)
    flat_tokens.add_input(str(path), split, "pose", pose)
    return str(path), ids, np.column_stack([kind, weight, pose.view(np.uint32)])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "d.zarr")


# ---- the dataset ---------------------------------------------------------------------------------


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(flat_tokens.writer, "INNER_CHUNK", 64)
    monkeypatch.setattr(flat_tokens.writer, "TOKENS_SHARD", 256)


@pytest.mark.quick
def test_zarr_python_reads_it_and_the_split_stays_what_it_was(tmp_path, small_shards):
    path, ids, values = write(tmp_path / "d")
    assert ids.size > 3 * 256
    group = zarr.open_group(path, mode="r")["train"]
    assert (group["input_kind"].dtype, group["input_kind"].shards) == (np.uint32, (256,))
    plain, both = (
        flat_tokens.Reader(path, "train", inputs=names) for names in ((), ("weight", "kind"))
    )
    assert both.fingerprint.startswith(plain.fingerprint + ", weight ")
    start, length = np.array([7, ids.size - 5]), np.array([300, 5])
    for name, expected in (("kind", values[:, 0]), ("weight", values[:, 1])):
        np.testing.assert_array_equal(group[f"input_{name}"][:], expected)
        found = np.concatenate([expected[a : a + n] for a, n in zip(start, length, strict=True)])
        np.testing.assert_array_equal(both.read(start, length, name), found)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "less", "message"),
    [
        ("new", 1, r"input_new: the values are uint32\[901\], not uint32\[902"),
        ("kind", 0, r"input_kind exists already, maybe incomplete. Delete it"),
    ],
)
def test_what_cannot_be_added(dataset, name, less, message):
    with pytest.raises(ValueError, match=message):
        flat_tokens.add_input(
            dataset[0], "train", name, np.zeros(dataset[1].size - less, np.uint32)
        )
    assert "input_new" not in zarr.open_group(dataset[0], mode="r")["train"]


def cut_file(array):
    file = max((array / "c").iterdir(), key=lambda path: int(path.name))
    file.write_bytes(file.read_bytes()[:-3])


def shorten(array):
    metadata = json.loads((array / "zarr.json").read_text())
    (array / "zarr.json").write_text(json.dumps(metadata | {"shape": [500]}))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            shutil.rmtree,
            r"d/train: the array train/input_kind is missing .* Add it with flat_token",
        ),
        (shorten, r"d/train is damaged: the size of input_kind is 500, not 902"),
        (cut_file, r"cannot read input_kind of tokens .*; a file is missing, truncated or corrupt"),
    ],
)
def test_a_damaged_one_is_refused(tmp_path, small_shards, damage, message):
    path, *_ = write(tmp_path / "d")
    damage(tmp_path / "d/train/input_kind")
    c = DataConfig(filespec=path)
    with pytest.raises(ValueError, match=message):
        make_loader(c, "train", 4, SEQ_LEN, inputs=("weight", "kind"))
    make_loader(c, "train", 4, SEQ_LEN, inputs=("weight",)).sequences(0, np.arange(4))
    with pytest.raises(ValueError, match=r"input_pose has 3 values per token, but 4 are read"):
        make_loader(c, "train", 4, SEQ_LEN, inputs={"pose": f32["4"]})


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "columns", "packing", "shuffled"),
    [
        (("kind",), [0], True, True),
        ({"weight": f32, "pose": f32["3"]}, [1, 2, 3, 4], False, True),
        ({"pose": f32["3"], "kind": u32}, [2, 3, 4, 0], True, False),
    ],
)
def test_rows_have_the_values_of_their_tokens(dataset, names, columns, packing, shuffled):
    """No two tokens are equal, so each tells its place."""
    path, ids, values = dataset
    place = np.zeros(ids.max() + 1, np.int64)
    place[ids] = np.arange(ids.size)
    data = DataConfig(filespec=path, shuffle=shuffled, sequence_packing=packing)
    loader = make_loader(data, "train", 8, SEQ_LEN, inputs=names)
    plain = make_loader(data, "train", 8, SEQ_LEN)
    for step in (0, 3, 1000):
        rows = loader.sequences(step, np.arange(8))
        without = dataclasses.replace(rows, inputs=None)
        jax.tree.map(np.testing.assert_array_equal, without, plain.sequences(step, np.arange(8)))
        expected = np.where(rows.loss_mask[..., None], values[place[rows.targets]][..., columns], 0)
        np.testing.assert_array_equal(rows.inputs, expected)
        assert rows.inputs.dtype == np.uint32
        assert packing or not rows.loss_mask.all()
        if "pose" in names:
            tokens = Tokens(rows.targets, None, inputs=rows.inputs, declared=(*names.items(),))
            floats = np.where(
                rows.loss_mask[..., None], values.view(np.float32)[place[rows.targets], 2:], 0
            )
            np.testing.assert_array_equal(tokens.input("pose"), floats)


# ---- a run ---------------------------------------------------------------------------------------


def losses(path, directory):
    """Of a run by the trainer itself: each step's, and the validation's."""
    model = importlib.import_module("second_input").ModelConfig(
        **dataclasses.asdict(tiny.model(vocab=2048, module="second_input"))
    )
    c = tiny.config(model, steps=2, eval_batches=2)
    c.data = DataConfig(filespec=str(path))
    directory.mkdir()
    with jax.set_mesh(tiny.mesh("one device")):
        train.train(c, load_model(c.model), directory)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    validations = [line["loss"] for line in lines if line.get("event") == "validation"]
    return losses_of(directory) + validations


@pytest.mark.long
def test_the_validation_loss_of_a_run_depends_on_the_inputs(tmp_path, monkeypatch, no_hashes):
    """Those of training: test_changing.py."""
    monkeypatch.setattr(train.Run, "check", lambda self: None)  # no proof, which takes longest
    write(tmp_path / "d", 2, 100)
    *_, values = write(tmp_path / "d", 3, 60, "validation")
    found = losses(tmp_path / "d", tmp_path / "run")
    shutil.rmtree(tmp_path / "d/validation/input_kind")
    flat_tokens.add_input(str(tmp_path / "d"), "validation", "kind", values[::-1, 0])
    other = losses(tmp_path / "d", tmp_path / "other")
    assert (np.abs(np.array(found) - other) > 1e-4).tolist() == [False] * 2 + [True]
