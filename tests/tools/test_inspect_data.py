"""What inspect_data prints, and that a batch it takes apart is the one the loader gives."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from numpy_checks import check_modules
from rich.console import Console
from written_datasets import TEXTS, write

from shardwright_data.flat_tokens import Reader
from shardwright_data.loader import DataConfig, FlatTokensLoader, SourceConfig, make_loader
from shardwright_data.loader.origins import find_documents, pieces_of, sequences_of_batch
from shardwright_data.text.definitions import train_bpe
from tools import inspect_data
from tools.inspect_data import Settings, one_line, open_codec

check_modules(inspect_data)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path / "d")


def show(**settings):
    console = Console(width=160, record=True, file=io.StringIO())
    inspect_data.run(Settings(**settings), console)
    return console.export_text()


def make_run(path, data, batch_size=8, seq_len=50):
    path.mkdir()
    lines = [f"data: {data}", f"training: {{batch_size: {batch_size}, seq_len: {seq_len}}}"]
    (path / "config.yaml").write_text("\n".join(lines))
    return str(path)


def test_overview(dataset):
    text = show(filespec=dataset, documents=3)
    lengths = np.array([len(text.encode()) + 1 for text in TEXTS])
    assert f"{lengths.sum():,}" in text
    assert "60, " in text
    assert f"{lengths.min()} to {lengths.max()} tokens, " in text
    assert f"median {int(np.median(lengths))}," in text
    for i in (0, 29, 59):
        assert TEXTS[i] in text


def test_one_document(dataset):
    assert TEXTS[17] in show(filespec=dataset, document=17)


def test_decoding_with_the_datasets_tokenizer(tmp_path):
    from shardwright_data.text.tokenizers import open_definition

    definition = train_bpe(TEXTS, 300)
    tokenizer = open_definition(definition, end_token="<|end|>")
    path = write(tmp_path / "d", tokenizer, {"tokenizer": {"kind": "train_bpe"}})
    (tmp_path / "d/tokenizer.json").write_text(definition)
    assert f"{TEXTS[3]}<|end|>" in show(filespec=path, document=3)


def test_without_a_tokenizer(tmp_path):
    path = write(tmp_path / "d", attributes={})
    assert "71 114 102" in show(filespec=path, document=0)


def test_text_on_one_line():
    assert one_line("a\nb\tc\x1b[31md") == "a⏎b⇥c�[31md"
    assert one_line("abcdef", 3) == "abc…"
    assert one_line("abc", 3) == "abc"


def test_find_documents(dataset):
    reader = Reader(dataset, "train")
    starts = zarr.open_array(dataset, path="train/seq_starts", mode="r")[:]
    places = np.arange(reader.num_tokens)
    expected = np.searchsorted(starts, places, side="right") - 1
    np.testing.assert_array_equal(find_documents(reader, places), expected)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_is_the_loaders(tmp_path, dataset, packing, mixed):
    if mixed:
        sources = {"one": SourceConfig(dataset, 3), "two": SourceConfig(write(tmp_path / "e"))}
        data = DataConfig(mixture=sources, sequence_packing=packing)
    else:
        data = DataConfig(filespec=dataset, sequence_packing=packing, seed=3)
    loader = make_loader(data, "train", 16, 50)
    codec = open_codec(dataset, {"tokenizer": {"kind": "bytes"}})
    for step in (0, 7, 10**6):
        batch = loader.sequences(step, np.arange(16))
        sequences = sequences_of_batch(loader, step, np.arange(16))
        assert [sequence.number for sequence in sequences] == list(range(16))
        for sequence in sequences:
            pieces = pieces_of(sequence)
            text = "".join(
                (TEXTS[piece.document] + "\0").encode()[piece.start : piece.start + piece.length].decode()
                for piece in pieces
            )
            mask = batch.loss_mask[sequence.number]
            assert codec.decode(batch.targets[sequence.number][mask].tolist()) == text.replace("\0", "")
            begins = [piece.position for piece in pieces if piece.start == 0]
            assert begins == np.flatnonzero(batch.is_seq_start[sequence.number]).tolist()
            assert [piece.document_length for piece in pieces] == [len(TEXTS[piece.document]) + 1 for piece in pieces]


def test_a_batch_of_a_run(tmp_path, dataset):
    run = make_run(tmp_path / "run", f"{{filespec: {dataset}, seed: 5}}")
    text = show(run=run, step=4, sequences=2, characters=20)
    loader = FlatTokensLoader(DataConfig(filespec=dataset, seed=5), "train", 8, 50)
    first = bytes((loader.sequences(4, np.array([1])).targets[0] - 3).astype(np.uint8)).decode(errors="replace")
    assert one_line(first)[:10] in text
    assert "sequence 0, epoch" in text
    assert "sequence 1, epoch" in text
    assert "sequence 2" not in text
    assert "6 more sequences" in text


def test_a_batch_of_a_run_whose_dataset_has_moved(tmp_path, dataset):
    here = make_run(tmp_path / "here", f"{{filespec: {dataset}}}")
    gone = make_run(tmp_path / "gone", "{filespec: nowhere.zarr}")
    tables = [show(run=run, step=3, filespec=dataset).split("\n", 1)[1] for run in (here, gone)]
    assert tables[0] == tables[1]
    assert "sequence 0, epoch" in tables[0]


def test_a_batch_of_a_mixture(tmp_path, dataset):
    other = write(tmp_path / "e")
    run = make_run(tmp_path / "run", f"{{mixture: {{a: {{filespec: {dataset}}}, b: {{filespec: {other}}}}}}}")
    text = show(run=run, step=4, sequences=8)
    assert "Tokens by source: a " in text
    assert ", a, epoch" in text
    assert ", b, epoch" in text


def test_check_of_a_sound_dataset(dataset):
    assert "marks, starts and attributes agree" in show(filespec=dataset, check=True)
    assert "agree" in show(filespec=str(ROOT / "tests/data/seqax_synthetic_dataset.zarr"), check=True)


FAULTS = {
    "mark": (
        lambda group: group["encoded_tokens"].__setitem__(50, 9),
        "the marks in encoded_tokens and seq_starts differ",
    ),
    "start": (lambda group: group["seq_starts"].__setitem__(2, 60), "seq_starts differ from document 2 on"),
    "empty": (lambda group: group["seq_starts"].__setitem__(2, group["seq_starts"][1]), "differ from document 2 on"),
    "largest": (lambda group: group.attrs.__setitem__("max_token_id", 500), "largest token id is 124, the .* says 500"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_of_a_faulty_dataset(dataset, name):
    spoil, message = FAULTS[name]
    spoil(zarr.open_group(dataset, path="train", mode="r+"))
    with pytest.raises(ValueError, match=message):
        show(filespec=dataset, check=True)


def test_check_reads_in_blocks(dataset):
    """Documents that cross blocks, and a block without a start."""
    reader = Reader(dataset, "train")
    (whole,) = reader.blocks()
    for size in (7, 50, 64):
        inspect_data.check(Console(file=io.StringIO()), reader, np.split(whole, range(size, whole.size, size)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Give filespec=<dataset>, or run="),
        ({"filespec": "D", "step": 3}, "Give filespec=<dataset>, or run="),
        ({"run": "nowhere", "step": 0}, "There is no nowhere/config.yaml"),
        ({"filespec": "D", "document": 60}, "document is 60; .* has documents 0 to 59"),
        ({"filespec": "D", "sequences": 0}, "sequences is 0; it must be at least 1"),
        ({"run": "M", "step": 0, "filespec": "D"}, "Give either run or filespec"),
        ({"run": "S", "step": 0}, "The run reads a stream, whose batches are not known"),
        ({"run": "B", "step": 0}, "training.batch_size is 'abc'; it must be a whole number"),
        ({"run": "T", "step": 0}, "data.seed is abc; it must be a whole number"),
    ],
)
def test_clear_errors(tmp_path, dataset, settings, message):
    runs = {
        "B": f"{{filespec: {dataset}}}",
        "T": f"{{filespec: {dataset}, seed: abc}}",
        "S": f"{{stream: {{train_files: [{ROOT / 'tests/data/austen_train.jsonl.xz'}]}}}}",
        "M": f"{{mixture: {{a: {{filespec: {dataset}}}, b: {{filespec: other}}}}}}",
    }
    settings = {name: dataset if value == "D" else value for name, value in settings.items()}
    if settings.get("run") in runs:
        size = "abc" if settings["run"] == "B" else 8
        settings["run"] = make_run(tmp_path / "run", runs[settings["run"]], batch_size=size)
    with pytest.raises(ValueError, match=message):
        show(**settings)


@pytest.mark.long
def test_command_line(dataset):
    command = [sys.executable, "-m", "tools.inspect_data", f"filespec={dataset}", "documents=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert TEXTS[0] in done.stdout
