"""Runs and checkpoints of a stranger: programs that read them import nothing and resolve
nothing.
"""

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
from shardwright.program.files import read_config
from shardwright.program.resume import open_run, read_weights
from shardwright.program.saved_config import check_resumes, config_of
from shardwright.settings.settings import made
from shardwright.tools import checkpoint_to_huggingface
from shardwright.tools.generate import MeshChoice, Settings, generate
from shardwright.tools.report import __main__ as report
from tests.support import tiny
from tests.support.local_server import LocalServer, SilentHandler
from tests.support.signed_manifests import sign

ROOT = Path(__file__).parents[2]
PAYLOAD = """
import pathlib
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

    def export(self) -> None:
        settings = {"run": str(self.directory), "output": str(self.directory / "out")}
        c = checkpoint_to_huggingface.Settings(**settings, check=False)
        checkpoint_to_huggingface.run(c, QUIET.print)

    def init_from(self) -> None:
        with jax.set_mesh(tiny.mesh("d=8")):
            read_weights(self.directory, None, {"model": {"module": "train"}})

    def resume(self) -> None:
        model = self.config["model"] | {"module": "train"}
        c = config_of(self.config | {"model": model, "pipeline": {}})
        check_resumes(self.config, c, self.directory, 1)


@pytest.fixture
def stranger(tmp_path, monkeypatch, archive, no_hashes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    return Stranger(archive, tmp_path / "runs" / "evil")


READERS = {
    "generate": lambda s: generate(Settings(run=str(s.directory), **IDS), QUIET),
    "export": lambda s: s.export(),
    "init_from": lambda s: s.init_from(),
    "resume": lambda s: s.resume(),
    "report": lambda s: report.show_report(report.Settings(run=str(s.directory)), QUIET),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.module", "runs.evil.payload"), ("pipeline.schedule", "runs.evil.payload:main")],
)
def test_no_module_of_a_saved_configuration_is_imported(stranger, name, value):
    stranger.write(**{name.replace(".", "__"): value})
    refused = {}
    for reader, read in READERS.items():
        try:
            read(stranger)
        except ValueError as error:
            refused[reader] = str(error)
    assert not stranger.ran
    for reader in ("generate", "export"):  # the others read without it
        assert f"{name} of the checkpoint is '{value}'" in refused[reader]
        assert "trust=true" in refused[reader]


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


FUNCTION = "runs.evil.payload:main"
NAMED = [("optimizer", {name: FUNCTION}) for name in ("algorithm", "loss", "schedule")]
NAMED += [("optimizer", {"groups": [{"match": "*", "algorithm": FUNCTION}]})]
NAMED += [("trackers", {"names": [FUNCTION]})]


@pytest.mark.quick
def test_no_function_that_a_run_names_is_imported(stranger):
    for section, settings in NAMED:
        own = stranger.config.get(section, {}) | settings
        with pytest.raises(ValueError, match=re.escape(FUNCTION)):
            config_of(stranger.config | {section: own})
    assert not stranger.ran


TEXTS = ["${oc.env:SECRET}", r"\${oc.env:SECRET}", r"\\${oc.env:SECRET}", "a${b", "'${x}'\\"]


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
        ("model: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("model: {when: 2020-01-01}", "a value that is not a setting"),
        ("a: &a {x: [1]}\nb: *a", r"it repeats a part, \*a, instead of writing it again"),
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
    ("pipeline", {"schedule": ["gpipe"]}, "config.pipeline.schedule is ['gpipe']; it must be a"),
    ("training", {"changes": CHANGES}, "training.changes has 1,000 entries; leave at most 128"),
    ("training", {"steps": "${x}"}, "training.steps is "),
]


@pytest.mark.parametrize(("section", "values", "message"), ODD)
def test_settings_that_no_run_saves_are_refused_in_one_line(stranger, section, values, message):
    run = stranger.write(**{f"{section}__{name}": value for name, value in values.items()})
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
STREAM = {"train_files": [URL], "validation_files": []}
TOKENIZED = {"train_files": ["x"], "tokenizer_kind": "huggingface", "tokenizer": "a/b"}
ADDRESSES = [
    ("data", {"filespec": URL}, "data.filespec"),
    ("data", {"filespec": None, "mixture": {"a": {"filespec": URL}}}, "data.mixture.a.filespec"),
    ("data", {"filespec": None, "stream": STREAM}, "data.stream.train_files"),
    ("data", {"filespec": None, "stream": {"dataset": "someone/data"}}, "data.stream.dataset"),
    ("data", {"filespec": None, "stream": TOKENIZED}, "data.stream.tokenizer"),
    ("training", {"changes": [{"step": 1, "data.filespec": URL}]}, "training.changes"),
]


@pytest.mark.parametrize(("section", "values", "name"), ADDRESSES)
def test_no_address_of_a_saved_configuration_is_opened(stranger, section, values, name):
    """By the function with which all tools open runs."""
    with LocalServer(Counting) as server:
        text = json.dumps(values).replace(URL, f"{server.url}/x")
        stranger.write(**{f"{section}__{key}": value for key, value in json.loads(text).items()})
        message = rf"^{re.escape(name)} of the run is '.*', which would be downloaded\. Give "
        with pytest.raises(ValueError, match=message):
            READERS["generate"](stranger)
        assert server.requests == []


def test_a_trusted_address_is_opened(stranger):
    with LocalServer(Counting) as server:
        run = stranger.write(data__filespec=f"{server.url}/x", data__stream=None)
        with pytest.raises(ValueError, match=r"cannot read the tokenizer of the dataset http"):
            generate(Settings(run=run, trust=True, prompt="a"), QUIET)
        assert server.requests
