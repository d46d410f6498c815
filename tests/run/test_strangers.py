"""Runs and checkpoints of a stranger: programs that read them import nothing and resolve nothing."""

import io
import json
import re
import sys
import tarfile
from pathlib import Path

import jax
import pytest
import tiny
from omegaconf import OmegaConf
from rich.console import Console
from signed_manifests import sign

from shardwright.modeling.model import is_shipped
from shardwright.run.files import read_config
from shardwright.run.opening import read_weights
from shardwright.run.resuming import check_resumes, config_of, literal, saved_config
from tools import checkpoint_to_huggingface
from tools.generate import MeshChoice, Settings, generate
from tools.report import __main__ as report

ROOT = Path(__file__).parents[2]
PAYLOAD = """
import pathlib
from train import *
pathlib.Path(__file__).with_name("ran").touch()
def main(p, m, v): return []
"""
IDS = {"prompt_ids": [5], "max_tokens": 1, "mesh": MeshChoice(r=1, d=8, t=1)}
QUIET = Console(file=io.StringIO())


class Stranger:
    """A run that came in an archive, with a module in it, and with the settings that `write` gives it."""

    def __init__(self, directory: Path):
        self.directory = directory
        with tarfile.open(ROOT / "tests" / "data" / "checkpoint_of_3_steps.tar.xz") as archive:
            archive.extractall(directory, filter="data")
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
        c = config_of(self.config | {"model": self.config["model"] | {"module": "train"}, "pipeline": {}})
        check_resumes(self.config, c, self.directory, 1)


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    yield Stranger(tmp_path / "runs" / "evil")
    for name in [name for name in sys.modules if name.partition(".")[0] == "runs"]:
        del sys.modules[name]


READERS = {
    "generate": lambda s: generate(Settings(run=str(s.directory), **IDS), QUIET),
    "export": lambda s: checkpoint_to_huggingface.run(
        checkpoint_to_huggingface.Settings(run=str(s.directory), output=str(s.directory / "out"), check=False),
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
        ({"model__module": "runs.evil.payload"}, "model.module of the checkpoint is 'runs.evil.payload', which is not"),
        ({"pipeline__schedule": "runs.evil.payload:main"}, "pipeline.schedule of the checkpoint is 'runs.evil.payload"),
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


def test_a_module_that_the_user_trusts_or_names_too_is_imported(stranger):
    stranger.write(model__module="runs.evil.payload")
    assert config_of(stranger.config, trust=True).model.module == "runs.evil.payload"
    assert stranger.ran
    (stranger.directory / "ran").unlink()
    del sys.modules["runs.evil.payload"]
    c = config_of(stranger.config, trust=True)
    assert stranger.ran
    check_resumes(stranger.config, c, stranger.directory, 1)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "shipped"),
    [("train", True), ("gpt2", True), ("models.gpt2", False), ("models", False), ("runs.evil.payload", False)]
    + [(name, False) for name in ("json", "shardwright.run.x", "tests/../runs/evil", "", "gpt2.", "../train")],
)
def test_what_is_shipped(name, shipped):
    assert is_shipped(name) == shipped


TEXTS = ["${oc.env:SECRET}", r"\${oc.env:SECRET}", r"\\${oc.env:SECRET}", "a${b", "$${now:}", "\\", "${", "'${x}'\\"]


@pytest.mark.quick
@pytest.mark.parametrize("text", TEXTS)
def test_a_saved_setting_is_the_text_that_it_was(text, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cr3t")
    config = OmegaConf.create(literal({"a": text, "b": [{"c": text}]}))
    assert OmegaConf.to_container(config, resolve=True) == {"a": text, "b": [{"c": text}]}


WRONG = [
    (
        {"provenance": {"source": {"train.py": [1]}, "programs": {}, "traced_by": ""}},
        "provenance.source.train.py is [1]",
    ),
    ({"provenance": {"source": {}, "programs": {}}}, "provenance.traced_by is missing"),
    ({"loader": {"step": "x"}}, "loader.step is 'x'"),
    ({"skips": {"norms": [["a", 1.0]]}}, "skips.norms is 'a'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_metadata_of_another_type_is_refused_by_name(stranger, changes, message):
    with pytest.raises(ValueError, match=re.escape(f"the checkpoint's metadata: {message}; it must be")) as error:
        saved_config(stranger.content["attributes"]["metadata"] | changes)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: " + "[" * 10**4, "cannot be read"),
        ("model: !!python/object/apply:os.system ['true']", "cannot be read: could not determine a constructor"),
        ("[1, 2]", "has no configuration of a run"),
        ("model: 3", "has no configuration of a run"),
        ("model: {when: 2020-01-01}", "what is no setting"),
        ("model: \xff", "has no configuration of a run"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_config_yaml_that_is_none_is_refused_in_one_line(text, message, tmp_path):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.quick
@pytest.mark.parametrize("metadata", [None, [], {}, {"config": 3}, {"config": {"model": []}}])
def test_a_checkpoint_without_a_configuration_is_refused(metadata):
    with pytest.raises(ValueError, match="has no configuration of a run"):
        saved_config(metadata)
