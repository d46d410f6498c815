"""push_to_hub: the files of an export arrive at a server of the hub, and no others; what goes wrong is one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_models as models
import jax
import pytest
import tiny
from hub_server import TOKEN, HubServer

from tools.checkpoint_to_huggingface import __main__ as tool
from tools.checkpoint_to_huggingface.hub import check_repository, files_of, push

ROOT = Path(__file__).parents[2]
NAMES = ["README.md", "config.json", "generation_config.json", "model.safetensors"]


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def export(tmp_path):
    """A directory with the files of an export, and one that is not part of it."""
    directory = tmp_path / "exported"
    directory.mkdir()
    for name in NAMES:
        (directory / name).write_bytes(os.urandom(1000))
    (directory / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# exported\n")
    (directory / "notes.txt").write_text("secret")
    return directory


def run(server: HubServer, directory: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs the tool as a user does, with a token for the server."""
    home = {"HF_HOME": str(directory.parent / "home"), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    given = os.environ | home | {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN} | environment
    command = [sys.executable, "-m", "tools.checkpoint_to_huggingface", f"output={directory}", "push_to_hub=me/mine"]
    return subprocess.run([*command, *settings], env=given, capture_output=True, text=True, cwd=directory.parent)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def only_line(done: subprocess.CompletedProcess) -> str:
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1
    return line


@pytest.mark.long
def test_a_run_is_exported_and_arrives(server, tmp_path):
    c = models.model("grouped")
    with jax.set_mesh(tiny.mesh("one device")):
        saved = models.save(tmp_path / "run", models.weights(c), c)
    output = tmp_path / "exported"
    done = run(server, output, f"run={saved}", "file_bytes=20000")
    assert done.returncode == 0, done.stderr
    repository = server.repositories["me/mine"]
    assert repository["files"] == contents(output)
    assert len(repository["commits"]) == 1
    assert repository["private"]
    assert "model.safetensors.index.json" in repository["files"]
    assert 'from_pretrained("me/mine")' in repository["files"]["README.md"].decode()
    files = f"{len(repository['files'])} files, private"
    assert done.stdout.splitlines()[-1] == f"pushed     {server.url}/me/mine: {files}"


@pytest.mark.slow
def test_an_export_arrives_without_what_is_not_part_of_it(server, export):
    done = run(server, export, "private=false")
    assert done.returncode == 0, done.stderr
    assert server.repositories["me/mine"]["files"] == {name: (export / name).read_bytes() for name in NAMES}
    assert not server.repositories["me/mine"]["private"]
    assert "not sent   notes.txt: not part of the export" in done.stdout
    # Again, changed: one more commit, into the repository that now exists.
    (export / "config.json").write_text("{}")
    assert run(server, export, "private=false").returncode == 0
    assert server.repositories["me/mine"]["files"]["config.json"] == b"{}"
    assert len(server.repositories["me/mine"]["commits"]) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wrong token", "Client error '401 Unauthorized' for url .*Invalid username or password"),
        pytest.param("no token", "there is no token; run `hf auth login`, or set HF_TOKEN", marks=pytest.mark.slow),
        pytest.param(
            "server error",
            "Server error '500 Internal Server Error' for url .*the server says no",
            marks=pytest.mark.slow,
        ),
        ("no server", "Connection refused"),
        pytest.param("forbidden", "403 Forbidden", marks=pytest.mark.slow),
        pytest.param(
            "public",
            r"it exists already and is public, so nothing was sent\. Give private=false",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_goes_wrong_is_one_line_and_the_export_stays(server, export, what, said):
    environment, before = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, contents(export)
    if what == "wrong token":
        environment["HF_TOKEN"] = "hf_another"
    elif what == "no token":
        environment["HF_TOKEN"] = ""
    elif what == "no server":
        environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    elif what == "public":
        server.add("me/mine", private=False)
    else:
        server.failing = re.compile("create" if what == "server error" else "commit/main")
        server.failure = 500 if what == "server error" else 403
    line = only_line(run(server, export, **environment))
    assert re.search(said, line), line
    assert line.startswith("Error: push_to_hub=me/mine")
    assert str(export) in line
    assert contents(export) == before
    assert not server.repositories.get("me/mine", {}).get("files")


# ---- which files --------------------------------------------------------------------------------------------------


def test_the_files_of_an_export(export):
    assert files_of(export) == sorted(NAMES)
    (export / "model.safetensors").rename(export / "model-00001-of-00001.safetensors")
    (export / "tokenizer.json").touch()
    places = {"a": "model-00001-of-00001.safetensors"}
    (export / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    expected = {*NAMES, "model.safetensors.index.json", "model-00001-of-00001.safetensors", "tokenizer.json"}
    assert {*files_of(export)} == expected - {"model.safetensors"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["missing", "a link"])
def test_what_is_no_export_is_not_sent(export, name, damage):
    (export / name).rename(export / "elsewhere")
    if damage == "a link":
        (export / name).symlink_to("elsewhere")
    with pytest.raises(ValueError, match=f"{name} is {damage}: the directory is not an export"):
        push(export, "me/mine", True, print)


@pytest.mark.parametrize("part", ["../../secret", "notes.txt", "*"])
def test_an_index_names_no_other_files(export, part):
    (export / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": part}}))
    with pytest.raises(ValueError, match="does not list the files of an export"):
        files_of(export)
    (export / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(ValueError, match=r"weight_map.a is 3; it must be a text. Export the run again."):
        files_of(export)


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/", "/mine", "me/mine--x", "me/a b", ""])
def test_a_name_that_no_repository_has_is_refused(name):
    with pytest.raises(ValueError, match=r"^push_to_hub is .*Give push_to_hub=<owner>/<name>\.$"):
        check_repository(name)


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"^run is missing; give run="):
        tool.run(tool.Config(output=str(tmp_path / "none")))
    with pytest.raises(ValueError, match=r"which is no directory\. Give run="):
        tool.run(tool.Config(output=str(tmp_path / "none"), push_to_hub="me/mine"))
    with pytest.raises(ValueError, match="license is 'a: b'; give its name"):
        tool.run(tool.Config(run="none", output=str(tmp_path / "none"), license="a: b"))
