"""Which files a pattern means: against a folder with links, caches, and files of other kinds and
splits.
"""

import os

import fsspec
import pytest

from shardwright.data.text.files import find_files
from shardwright.data.text.sources import Files, documents, open_text

POINTERS = {
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "git annex get": b"/annex/objects/SHA256E-s12345--4d7a.jsonl\n",
}


@pytest.fixture
def folder(tmp_path):
    """Four files to read, and what is beside them."""
    root = tmp_path / "[te]xts"
    sizes = {"a.jsonl": 1, "b.ndjson": 1, "c/d.JSONL": 1, "c/e.csv.GZ": 1}
    sizes |= {"AA/wiki_00": 9, "d.jsonl.lz4": 8, "f.tsv": 7, ".hidden.txt": 6, "cache-1f.arrow": 5}
    sizes |= {"c/dataset_info.json": 4, "c/.git/x.txt": 1, "none.jsonl": 0}
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    (root / "latest").symlink_to(".")
    (root / "c/up").symlink_to("..")
    (root / "g.jsonl").symlink_to("a.jsonl")
    os.link(root / "b.ndjson", root / "h.ndjson")
    return root


READ = ["a.jsonl", "b.ndjson", "c/d.JSONL", "c/e.csv.GZ"]
LEFT_OUT = [".hidden.txt", "AA/wiki_00", "c/dataset_info.json", "cache-1f.arrow", "d.jsonl.lz4"]
LEFT_OUT += ["f.tsv", "none.jsonl"]


@pytest.mark.parametrize("spelled", ["{}", "{}/", "file://{}"])
def test_a_folder_is_its_text_files_each_once(folder, spelled):
    found = find_files([spelled.format(folder)], "train")
    assert [os.path.relpath(path, folder) for path in found.paths] == READ
    assert found.left_out == LEFT_OUT
    left_out = f"left out: {', '.join(LEFT_OUT[:5])} and 2 more"
    assert found.described("train") == [f"train: 4 files, 0.0 MB here; {left_out}"]


@pytest.mark.parametrize(
    ("pattern", "read", "left_out"),
    [
        ("*.jsonl", ["a.jsonl"], ["none.jsonl"]),
        ("**/c/**/?.*.GZ", ["./c/e.csv.GZ"], []),
        ("[cA]*", ["c/d.JSONL", "c/e.csv.GZ", "c/up/a.jsonl", "c/up/b.ndjson"], None),
        ("latest/c/*.JSONL", ["latest/c/d.JSONL"], []),
        (".h*", [".hidden.txt"], []),
        ("none.jsonl", ["none.jsonl"], []),
    ],
)
def test_a_glob_is_what_it_matches(folder, monkeypatch, pattern, read, left_out):
    """Its folders are read whole."""
    monkeypatch.chdir(folder)
    found = find_files([pattern], "train")
    assert found.paths == read
    assert left_out in (None, found.left_out)


def test_several_patterns_read_a_file_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    url = "https://host/a.jsonl"
    found = find_files(["c/d.JSONL", "*.ndjson", "./a.jsonl", ".", url, url], "train")
    paths = [os.path.normpath(path) for path in found.paths[:-1]]
    assert paths == ["c/d.JSONL", "b.ndjson", "a.jsonl", "c/e.csv.GZ"]
    assert found.paths[-1] == url
    assert len(find_files(["latest/a.jsonl"], "train").shared_with(found)) == 1
    assert not find_files(["cache-1f.arrow"], "train").shared_with(found)


def test_what_save_to_disk_wrote_is_its_data_alone(tmp_path, monkeypatch):
    """Against load_from_disk, after map() left its cache."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    saved = str(tmp_path / "saved")
    texts = [f"document {i}" for i in range(20)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(saved, num_shards=2)
    datasets.load_from_disk(saved).map(lambda row: {"text": row["text"].upper()})
    assert [path for path in os.listdir(saved) if path.startswith("cache-")]
    for dataset, files in ((None, [saved]), (None, [f"{saved}/*.arrow"]), (saved, [])):
        _, data, found = open_text("train", dataset, None, "train", files)
        assert isinstance(data, Files)
        assert list(documents("saved", data, "text")) == texts
        assert any(name.startswith("cache-") for name in found.left_out)
    os.remove(f"{saved}/data-00001-of-00002.arrow")
    message = r"state\.json lists data-00001-of-00002\.arrow, which is missing"
    with pytest.raises(ValueError, match=message):
        find_files([saved], "train")


TRAIN, TEST = "data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("split", "patterns", "others"),
    [
        ("train", ["."], [TEST, "data/val_0.jsonl"]),
        ("validation", ["."], [TEST, TRAIN]),
        ("train", ["data/train*", "data/val_0.jsonl", "data/test*"], []),
        ("data", ["."], []),
    ],
)
def test_names_of_other_splits_are_a_warning(tmp_path, monkeypatch, split, patterns, others):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    for name in (TRAIN, TEST, "data/val_0.jsonl", "data/contest.jsonl"):
        (tmp_path / name).write_bytes(b"x")
    found = find_files(patterns, split)
    assert found.of_other_splits == others
    assert len(found.described(split)) == 1 + bool(others)


@pytest.mark.parametrize("command", POINTERS)
def test_pointers_are_named(tmp_path, command):
    """Before anything is read; those at a URL when their turn comes."""
    for name in ("a.jsonl", "b.txt", "c.parquet", "d.json.gz", "e.arrow", "f.csv"):
        message = f"{name} is a pointer .*Run `{command}`"
        (tmp_path / name).write_bytes(POINTERS[command])
        for pattern in (name, "*", ""):
            with pytest.raises(ValueError, match=message):
                find_files([str(tmp_path / pattern)], "train")
        (tmp_path / name).unlink()
        fsspec.filesystem("memory").pipe(f"/{name}", POINTERS[command])
        data = open_text("train", None, None, None, [f"memory://{name}"])[1]
        with pytest.raises(ValueError, match=message):
            list(documents("text", data, "text"))
