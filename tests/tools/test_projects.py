"""Making a project of one's own where nothing can be written."""

import sys

import pytest

from shardwright.tools import fork
from shardwright.tools.init.__main__ import main
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
