"""Streams against tokenizing the whole text at once; resuming against an unbroken run."""

import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from shardwright.data.loader import DataConfig, StreamConfig, make_loader, steps_for, stream
from shardwright.data.text import definitions
from tests.support.numpy_checks import check_modules

check_modules(stream)

SEQ_LEN = 16
BATCH = 3
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
]


@pytest.fixture(scope="module")
def texts():
    """Documents of 0 to 12 words; every seventh is empty or missing, the words' numbers make each
    unlike the others.
    """
    rng = np.random.default_rng(0)
    texts = []
    for i in range(90):
        words = rng.choice(WORDS, rng.integers(1, 12))
        texts.append((" ".join(words) + f" {i}") if i % 7 else ["", None][i % 2])
    return texts


@pytest.fixture(scope="module")
def files(tmp_path_factory, texts):
    """The texts in three files of two kinds."""
    root = tmp_path_factory.mktemp("text")
    paths = [root / "part0.jsonl", root / "part1.jsonl", root / "part2.parquet"]
    for path, part in zip(paths, (texts[:40], texts[40:41], texts[41:]), strict=True):
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in part))
        else:
            table = pyarrow.table({"text": pyarrow.array(part, pyarrow.string())})
            pyarrow.parquet.write_table(table, path, row_group_size=11)
    return [*map(str, paths)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(definitions.train_bpe([text for text in texts if text], 300))
    return str(path)


def make(files, *, state=None, split="train", stream_settings=None, vocab_size=None, **settings):
    given = {f"{split}_files": files, "shuffle_block": 8} | (stream_settings or {})
    config = DataConfig(stream=StreamConfig(**given), **settings)
    return make_loader(config, split, BATCH, SEQ_LEN, vocab_size, state=state)


def batches(loader, steps):
    """[step]: the fields of the batch, whole."""
    return [loader.sequences(step, np.arange(loader.batch_size)) for step in steps]


def joined(found):
    """Targets, starts and mask of several batches."""
    return jax.tree.leaves(jax.tree.map(lambda *x: np.concatenate(x), *found))


def same(first, second):
    jax.tree.map(np.testing.assert_array_equal, list(first), list(second))


def as_bytes(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 3


def check_repeated(found, expected):
    """What was read is `expected`, again and again."""
    np.testing.assert_array_equal(found.ravel(), np.resize(expected, found.size))


def test_a_stream_without_text_says_so_each_time(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    loader = make([str(tmp_path / "a.jsonl")])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"The stream .*a.jsonl has no text"):
            batches(loader, [0])


def test_other_files_than_those_of_the_state_are_refused(tmp_path):
    (tmp_path / "b.txt").write_text("one line\n" * 50)
    loader = make([str(tmp_path / "*.txt")])
    batches(loader, range(2))
    state = json.loads(json.dumps(loader.state(2)))
    make([str(tmp_path / "b.txt")], state=state)
    (tmp_path / "a.txt").write_text("another\n")  # which is read first
    with pytest.raises(ValueError, match=r"differ from the checkpoint's, by name or size"):
        make([str(tmp_path / "*.txt")], state=state)


def test_training_and_validation_on_the_same_data_are_refused(tmp_path, files, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "link.jsonl").symlink_to(files[0])
    for settings, of_validation in (
        ({"train_files": [str(tmp_path)]}, files[:1]),
        ({"dataset": str(tmp_path), "validation": "train"}, []),
    ):
        message = r"data\.stream trains and validates on (.*link\.jsonl|train)\. Choose"
        with pytest.raises(ValueError, match=message):
            make(of_validation, split="validation", stream_settings=settings)


def test_packed_in_order(files, texts):
    loader = make(files, shuffle=False, stream_settings={"end_token": "</s>"})
    documents = [np.append(as_bytes(text), 1) for text in texts if text]
    ids = np.concatenate(documents)
    marks = np.concatenate([np.arange(document.size) == 0 for document in documents])
    # Over the end of the stream, where the next epoch follows without a gap.
    found = joined(batches(loader, range(2 * ids.size // loader.tokens_per_batch)))
    assert found[0].size > 1.9 * ids.size
    check_repeated(found[0], ids)
    check_repeated(found[1], marks)
    assert found[2].all()
    assert [field.dtype for field in found] == [np.uint32, np.bool_, np.bool_]


def test_unpacked(files, texts):
    loader = make(files, shuffle=False, sequence_packing=False)
    targets, is_seq_start, loss_mask = joined(batches(loader, range(20)))
    documents = [as_bytes(text)[:SEQ_LEN] for text in texts if text][:60]
    expected = np.stack([np.pad(document, (0, SEQ_LEN - document.size)) for document in documents])
    np.testing.assert_array_equal(targets, expected)
    lengths = np.array([[document.size] for document in documents])
    np.testing.assert_array_equal(loss_mask, np.arange(SEQ_LEN) < lengths)
    np.testing.assert_array_equal(is_seq_start, np.tile(np.arange(SEQ_LEN) == 0, (60, 1)))


def documents_of(found):
    """The documents that rows hold, those at either end cut."""
    ids, marks = (x.ravel() for x in joined(found)[:2])
    parts = np.split(ids, np.flatnonzero(marks)[1:])
    return [bytes((part - 3).tolist()).decode() for part in parts]


def test_shuffled_within_blocks(files, texts):
    whole = [text for text in texts if text]
    size = sum(len(text.encode()) for text in whole)
    epochs = []
    for seed in (0, 1):
        loader = make(files, seed=seed)
        # Two epochs; the last document is cut.
        found = documents_of(batches(loader, range(2 * size // loader.tokens_per_batch + 1)))
        epochs += [found[: len(whole)], found[len(whole) : 2 * len(whole)]]
    assert len({*map(tuple, [whole, *epochs])}) == 5
    for epoch in epochs:
        blocks = [
            [whole.index(text) - start for text in epoch[start : start + 8]]
            for start in range(0, len(whole), 8)
        ]
        assert [sorted(block) for block in blocks] == [[*range(len(block))] for block in blocks]
        assert len({*map(tuple, blocks)}) > 5


@pytest.mark.parametrize("packed", [False, True])
def test_resumes_at_every_step_as_if_never_stopped(files, bpe, packed):
    settings = {"shuffle": packed, "sequence_packing": packed}
    if packed:
        kind = {"tokenizer_kind": "huggingface", "tokenizer": bpe, "end_token": "<|end|>"}
        settings["stream_settings"] = kind
    loader = make(files, **settings)
    unbroken, states = [], []
    for step in range(60):
        states.append(json.dumps(loader.state(step)))
        unbroken += batches(loader, [step])
    assert json.loads(states[-1])["epoch"]
    for step in range(0, 60, 5):
        resumed = make(files, state=json.loads(states[step]), **settings)
        assert json.dumps(resumed.state(step)) == states[step]
        same(batches(resumed, range(step, step + 4)), unbroken[step : step + 4])


def test_a_step_again_and_one_out_of_order(files):
    loader = make(files)
    first = batches(loader, [0, 0, 1, 2, 3])
    same(first[:1], first[1:2])
    same(batches(loader, [2, 3, 0]), [first[3], first[4], first[0]])
    message = r"has no state for step 9, only for 0, 4 and some in between"
    with pytest.raises(ValueError, match=message):
        loader.state(9)
    # batches are left out by reading them
    same(batches(loader, [9]), batches(make(files), range(10))[9:])
    resumed = make(files, state=loader.state(3))
    with pytest.raises(ValueError, match="has no state for step 2"):
        batches(resumed, [2])


def test_unknown_length(files):
    loader = make(files)
    assert loader.num_tokens is None
    assert steps_for(loader, tokens=SEQ_LEN * BATCH * 5) == 5
    message = r"only a single dataset has epochs. Give the length in steps or tokens"
    with pytest.raises(ValueError, match=message):
        steps_for(loader, epochs=1)


def test_ids_beyond_the_vocabulary_are_refused(files):
    message = "259 ids, more than the model's vocabulary of 258. Set the vocabulary"
    with pytest.raises(ValueError, match=message):
        batches(make(files, vocab_size=258), [0])
