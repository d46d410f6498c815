"""Making a project of one's own, and where nothing can be written."""

import subprocess
import sys

import pytest

from shardwright.tools import fork, write_synthetic_dataset
from shardwright.tools.init.__main__ import main
from shardwright.tools.write_synthetic_dataset import Settings
from tests.support.full_disk import files_of_at_most

pytestmark = pytest.mark.quick


def init(monkeypatch, directory):
    monkeypatch.setattr(sys, "argv", ["shardwright init", str(directory)])
    main()


def make_fork(monkeypatch, *_):
    monkeypatch.setattr(sys, "argv", ["shardwright fork"])
    fork.main()


@pytest.mark.parametrize("program", [init, make_fork])
def test_a_full_disk_leaves_nothing_so_the_same_command_succeeds_later(
    monkeypatch, tmp_path, program
):
    monkeypatch.chdir(tmp_path)
    with (
        files_of_at_most(1000),
        pytest.raises(SystemExit, match=r"^Error: .*File too large.* Check the path"),
    ):
        program(monkeypatch, ".")
    assert not list(tmp_path.iterdir())
    program(monkeypatch, ".")
    assert (tmp_path / "train.py").exists() or (tmp_path / "my_model.py").exists()


def test_a_folder_with_a_repository_becomes_a_project(monkeypatch, tmp_path, capsys):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    init(monkeypatch, ".")
    assert {".git", ".gitignore", "README.md", "my_model.py"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert (tmp_path / "launch").is_dir()
    assert not (tmp_path / "launch").is_symlink()
    with pytest.raises(SystemExit, match="is not empty"):
        init(monkeypatch, ".")


def test_the_next_command_is_quoted(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name, quoted in {"a b": "'a b'", "~": "'./~'"}.items():
        init(monkeypatch, name)
        assert f"  cd {quoted}\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has characters that cannot be printed"):
        init(monkeypatch, "a\nb")


def test_a_place_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file/project"):
        with pytest.raises(
            SystemExit, match=f"^Error: Not a directory: {tmp_path}/file.*Check the path"
        ):
            init(monkeypatch, place)
    monkeypatch.setattr(fork, "FORK", tmp_path / "file/train.py")
    with pytest.raises(SystemExit, match=f"^Error: File exists: {tmp_path}/file. Check the path"):
        make_fork(monkeypatch)
    with pytest.raises(ValueError, match="cannot be written"):
        write_synthetic_dataset.write(Settings(out=f"{tmp_path}/file/data"))
