"""Runs and checkpoints of a stranger: programs that read them import nothing and resolve
nothing.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from shardwright.data.loader import StreamConfig
from shardwright.modeling.model import load_model
from shardwright.program.files import read_config
from shardwright.program.resume import open_run, read_weights
from shardwright.program.saved_config import check_resumes, config_of
from shardwright.program.step import trace_step
from shardwright.settings.settings import made
from shardwright.tools import checkpoint_to_huggingface, evaluate
from shardwright.tools.generate import MeshChoice, Settings, generate
from shardwright.tools.replay import __main__ as replay
from shardwright.tools.report import __main__ as report
from tests.support import tiny
from tests.support.local_server import LocalServer, SilentHandler
from tests.support.signed_manifests import sign

ROOT = Path(__file__).parents[2]
PAYLOAD = """
import pathlib
from train import *
pathlib.Path(__file__).with_name("ran").touch()
def main(p, m, v): return []
"""
IDS = {"prompt_ids": [5], "max_tokens": 1, "mesh": MeshChoice(r=1, d=8, t=1)}
QUIET = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    directory = tmp_path_factory.mktemp("archive")
    with tarfile.open(ROOT / "tests" / "data" / "checkpoint_of_3_steps.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


class Stranger:
    """A run that came in an archive, with a module in it, and with the settings that `write` gives
    it.
    """

    def __init__(self, archive: Path, directory: Path):
        self.directory = directory
        shutil.copytree(archive, directory)
        (directory / "payload.py").write_text(PAYLOAD)
        self.manifest = directory / "checkpoints" / "0000000003" / "zarr.json"
        self.content = json.loads(self.manifest.read_text())
        self.config = self.content["attributes"]["metadata"]["config"]

    def write(self, **settings) -> str:
        for name, value in settings.items():
            section, _, key = name.partition("__")
            self.config[section][key] = value
        sign(self.manifest, self.content["attributes"])
        OmegaConf.save(self.config, self.directory / "config.yaml")
        return str(self.directory)

    @property
    def ran(self) -> bool:
        return (self.directory / "ran").exists()

    def init_from(self) -> None:
        with jax.set_mesh(tiny.mesh("d=8")):
            read_weights(self.directory, None, {"model": {"module": "train"}})

    def resume(self) -> None:
        c = config_of(
            self.config | {"model": self.config["model"] | {"module": "train"}, "pipeline": {}}
        )
        check_resumes(self.config, c, self.directory, 1)


@pytest.fixture
def stranger(tmp_path, monkeypatch, archive, no_hashes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    return Stranger(archive, tmp_path / "runs" / "evil")


READERS = {
    "generate": lambda s: generate(Settings(run=str(s.directory), **IDS), QUIET),
    "export": lambda s: checkpoint_to_huggingface.run(
        checkpoint_to_huggingface.Settings(
            run=str(s.directory), output=str(s.directory / "out"), check=False
        ),
        QUIET.print,
    ),
    "init_from": lambda s: s.init_from(),
    "resume": lambda s: s.resume(),
    "report": lambda s: report.show_report(report.Settings(run=str(s.directory)), QUIET),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model__module": "runs.evil.payload"},
            "model.module of the checkpoint is 'runs.evil.payload', which is not",
        ),
        (
            {"pipeline__schedule": "runs.evil.payload:main"},
            "pipeline.schedule of the checkpoint is 'runs.evil.payload",
        ),
    ],
)
def test_no_module_of_a_saved_configuration_is_imported(stranger, reader, settings, message):
    stranger.write(**settings)
    try:
        READERS[reader](stranger)
        error = ""
    except ValueError as refused:
        error = str(refused)
    assert not stranger.ran
    if reader in ("generate", "export"):  # the others read without it
        assert message in error
        assert "trust=true" in error
        assert "\n" not in error


COMMAND = "from shardwright.__main__ import main\nmain()\n"
PLANTED = ("numpy.py", "train.py", "hydra_plugins/evil.py", "payload.py")


def executed(directory: Path, *words: str) -> list[str]:
    """Runs the command `shardwright` in a directory. Returns which of PLANTED ran."""
    for name in PLANTED:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        marker = f"open({str(path.with_suffix('.ran'))!r}, 'w').close()"
        path.write_text(f"{marker}\n\n\nSPEC = None\n")
    script = directory.parent / "shardwright"
    script.write_text(COMMAND)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, script, *words]
    done = subprocess.run(run, cwd=directory, env=env, capture_output=True, text=True, timeout=200)
    assert "Error" in done.stderr or not done.returncode, done.stderr
    return [name for name in PLANTED if (directory / name).with_suffix(".ran").exists()]


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        (("report", "run=."), []),
        (("generate", "run=.", "step=9", "prompt=a"), []),
        (("generate", "run=.", "step=9", "prompt=a", "trust=true"), ["numpy.py"]),
    ],
)
def test_a_program_that_reads_a_run_imports_what_lies_where_it_starts_only_with_trust(
    stranger, words, ran
):
    stranger.write()
    assert executed(stranger.directory, *words) == ran


def test_a_module_that_the_user_trusts_or_names_too_is_imported(stranger):
    stranger.write(model__module="runs.evil.payload")
    assert config_of(stranger.config, trust=True).model.module == "runs.evil.payload"
    assert stranger.ran
    (stranger.directory / "ran").unlink()
    del sys.modules["runs.evil.payload"]
    c = config_of(stranger.config, trust=True)
    assert stranger.ran
    check_resumes(stranger.config, c, stranger.directory, 1)


SPELLED = "runs.evil.payload:main", "runs.evil.payload"
NAMED = [("optimizer", {"algorithm": name}) for name in SPELLED]
NAMED += [("optimizer", {name: SPELLED[0]}) for name in ("loss", "schedule")]
NAMED += [("optimizer", {"groups": [{"match": "*", "algorithm": SPELLED[0]}]})]
NAMED += [("trackers", {"names": [name]}) for name in SPELLED[:2]]


@pytest.mark.quick
@pytest.mark.parametrize(("section", "settings"), NAMED)
def test_no_function_that_a_run_names_is_imported(stranger, section, settings):
    """However it is spelled: with a colon it is refused at once, and nothing else is imported."""
    stranger.config[section] = stranger.config.get(section, {}) | settings
    with contextlib.suppress(ValueError):
        c = config_of(stranger.config)
        assert settings in ({"algorithm": SPELLED[1]}, {"names": [SPELLED[1]]}), (
            "which names no function"
        )
        model = load_model(c.model)
        with jax.set_mesh(tiny.mesh("one device")):
            trace_step(c, model).traced  # noqa: B018
    assert not stranger.ran


TEXTS = [
    "${oc.env:SECRET}",
    r"\${oc.env:SECRET}",
    r"\\${oc.env:SECRET}",
    "a${b",
    "$${now:}",
    "\\",
    "${",
    "'${x}'\\",
]


@pytest.mark.quick
def test_a_saved_setting_is_the_text_that_it_was(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cr3t")
    saved = {"train_files": TEXTS, "dataset": TEXTS[0]}
    found = made(StreamConfig, saved)
    assert (found.train_files, found.dataset) == (TEXTS, TEXTS[0])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: " + "[" * 10**4, "cannot be read"),
        (
            "model: !!python/object/apply:os.system ['true']",
            "cannot be read: could not determine a constructor",
        ),
        ("model: 3", "has no configuration of a run"),
        ("model: {when: 2020-01-01}", "a value that is not a setting"),
        ("\x00", "cannot be read"),
        (
            "a: &a {x: [1]}\nb: *a",
            r"cannot be read: it repeats a part, \*a, instead of writing it again\. Copy",
        ),
    ],
)
def test_a_config_yaml_that_is_none_is_refused_in_one_line(text, message, tmp_path):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


CHANGES = [{"step": i + 1, "optimizer.learning_rate": 0.1} for i in range(1000)]
ODD = [
    ("model", None, "config.model is missing; it must be an object"),
    (
        "pipeline",
        {"schedule": ["gpipe"]},
        "config.pipeline.schedule is ['gpipe']; it must be a text",
    ),
    ("training", {"changes": CHANGES}, "training.changes has 1,000 entries; leave at most 128"),
    ("training", {"steps": "${x}"}, "training.steps is "),
    ("optimizer", {"beta": 1}, "there is no setting optimizer.beta"),
]


@pytest.mark.parametrize(("section", "values", "message"), ODD)
def test_settings_that_no_run_saves_are_refused_in_one_line(stranger, section, values, message):
    if values is None:
        del stranger.config[section]
    else:
        stranger.config[section] = stranger.config.get(section, {}) | values
    run = stranger.write()
    with pytest.raises(ValueError, match=re.escape(message)) as error, open_run(run, None, False):
        pass
    assert "\n" not in str(error.value)


# ---- addresses -----------------------------------------------------------------------------------


class Counting(SilentHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        self.send_error(404)

    do_HEAD = do_PUT = do_POST = do_GET


URL = "http://127.0.0.1:{port}/x"
ADDRESSES = [
    ("data", {"filespec": URL}, "data.filespec"),
    ("data", {"filespec": None, "mixture": {"a": {"filespec": URL}}}, "data.mixture.a.filespec"),
    (
        "data",
        {"filespec": None, "stream": {"train_files": [URL], "validation_files": []}},
        "data.stream.train_files",
    ),
    ("data", {"filespec": None, "stream": {"dataset": "someone/data"}}, "data.stream.dataset"),
    (
        "data",
        {
            "filespec": None,
            "stream": {"train_files": ["x"], "tokenizer_kind": "huggingface", "tokenizer": "a/b"},
        },
        "data.stream.tokenizer",
    ),
    ("training", {"changes": [{"step": 1, "data.filespec": URL}]}, "training.changes"),
]
OPENERS = READERS | {
    "evaluate": lambda s: evaluate.evaluate(evaluate.Settings(run=str(s.directory)), QUIET),
    "replay": lambda s: replay.replay(replay.Settings(run=str(s.directory), step=2), QUIET),
}


# Each opens the run by the same function: each address for one of them, and one address for each.
OPENED = [("generate", *address) for address in ADDRESSES]
OPENED += [(opener, *ADDRESSES[0]) for opener in ("evaluate", "replay")]


@pytest.mark.parametrize(("opener", "section", "values", "name"), OPENED)
def test_no_address_of_a_saved_configuration_is_opened(stranger, opener, section, values, name):
    with LocalServer(Counting) as server:
        text = json.dumps(values).replace(URL, f"{server.url}/x")
        stranger.write(**{f"{section}__{key}": value for key, value in json.loads(text).items()})
        message = (
            rf"^{re.escape(name)} of the run is '.*', which would be downloaded\. Give "
            rf"trust=true .*\.$"
        )
        with pytest.raises(ValueError, match=message):
            OPENERS[opener](stranger)
        assert server.requests == []


def test_a_trusted_address_is_opened(stranger):
    with LocalServer(Counting) as server:
        run = stranger.write(data__filespec=f"{server.url}/x", data__stream=None)
        with pytest.raises(ValueError, match=r"cannot read the tokenizer of the dataset http"):
            generate(Settings(run=run, trust=True, prompt="a"), QUIET)
        assert server.requests
