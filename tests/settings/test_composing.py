"""What a command line composes and refuses, beside the mistakes of mistakes.txt."""

import dataclasses
import shlex
import sys
from typing import Any

import pytest

from shardwright.program.changes import config_at
from shardwright.program.checks import register_schema
from shardwright.program.config import Config
from shardwright.program.resume import CheckpointChoice
from shardwright.run import launch
from shardwright.run.launch import CONFIGS
from shardwright.settings.command_line import Program, parse
from shardwright.settings.output import as_installed, override
from shardwright.settings.program import FULL_ERROR, start
from shardwright.settings.settings import made

BASE = "--config-name=local_test_synthetic"


@pytest.fixture(name="composed")
def _composed(tmp_path, monkeypatch):
    """Function that composes arguments and returns the configurations of their jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv(FULL_ERROR, "0")
    register_schema()

    def composed(*arguments):
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        found = []
        start(
            Program("python -m train", CONFIGS, None, Config),
            lambda config: found.append(made(Config, config)),
        )
        return found

    return composed


@pytest.fixture(name="mine")
def _mine(tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mymodel.yaml").write_text("vocab: 1280\n")
    (tmp_path / "mine" / "mine.yaml").write_text(
        "defaults: [local_test_synthetic, _self_]\ntraining: {steps: 5}\n"
    )
    return f"--config-dir={tmp_path}/mine"


def test_configurations_of_config_dir_in_any_order(mine, composed):
    """A list of one value needs no brackets."""
    lists = "data.skip_steps=3", "training.sample_prompts=It is a truth"
    (config,) = composed("training.seed=3", mine, "model=mymodel", "--config-name=mine", *lists)
    assert (config.model["vocab"], config.training.steps, config.training.seed) == (1280, 5, 3)
    assert (config.data.skip_steps, config.training.sample_prompts) == ([3], ["It is a truth"])
    with pytest.raises(
        SystemExit, match=r"model is mymodl; choose one of .*Did you mean mymodel\?"
    ):
        composed(mine, BASE, "model=mymodl")


def test_a_sweep_is_composed_as_a_whole_before_its_first_job(composed):
    swept = (
        "model=glob(de*)",
        "training.seed=range(1,2)",
        "data.skip_steps=[1],[2]",
        "paths.model_name=x",
    )
    found = composed(BASE, "--multirun", *swept)
    assert [(config.training.seed, config.data.skip_steps) for config in found] == [
        (1, [1]),
        (1, [2]),
    ]
    with pytest.raises(SystemExit, match=r"^Error: training\.seed is x; it must be a whole number"):
        composed(BASE, "--multirun", "training.seed=1,x", "paths.model_name=x")


@pytest.mark.parametrize("value", ["x", "runs/x", "run=x", "run=runs/x"])
def test_a_run_is_found_by_what_a_shell_completes(value, tmp_path, monkeypatch):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "a,b").mkdir()
    monkeypatch.chdir(tmp_path)
    tool = Program("python -m tools.generate", CONFIGS, "base", CheckpointChoice)
    assert parse(tool, [value, "trust=true"]).words == ["trust=true", 'run="runs/x"']
    assert parse(tool, ["run=s3://x/y"]).words == ["run=s3://x/y"]
    several = Program(
        "python -m tools.report",
        CONFIGS,
        "base",
        dataclasses.make_dataclass("Settings", [("run", Any)]),
    )
    assert parse(several, [value, "runs/a,b"]).words == ['run=["runs/x","runs/a,b"]']


def test_a_directory_is_read_beside_the_projects_own(mine, composed, tmp_path, monkeypatch):
    """Such as that of an imported model, by the command that the import prints; and it comes
    first.
    """
    (tmp_path / "project" / "configs").mkdir(parents=True)
    text = "defaults: [local_test_synthetic, _self_]\ntraining: {steps: %d}\n"
    for name, steps in (("own", 7), ("mine", 8)):
        (tmp_path / "project" / "configs" / f"{name}.yaml").write_text(text % steps)
    monkeypatch.chdir(tmp_path / "project")
    (config,) = composed(mine, "--config-name=own", "model=mymodel")
    assert (config.model["vocab"], config.training.steps) == (1280, 7)
    (config,) = composed(mine, "--config-name=mine")
    assert config.training.steps == 5


@pytest.mark.parametrize(
    "given", ["++training.steps=7", "training={steps:7}", "++training={steps:7}"]
)
def test_a_section_is_given_in_any_form(given, composed):
    (config,) = composed(BASE, given)
    assert config.training.steps == 7
    with pytest.raises(SystemExit, match=r"already at 'training\.steps'\. Either remove \+ prefix"):
        composed(BASE, "+training.steps=7")


def test_a_null_section_is_made_by_its_first_setting(composed):
    (config,) = composed(
        BASE, "data.filespec=null", "data.stream.train_files=[a]", "optimizer.base.d_model=64"
    )
    assert (config.data.stream.train_files, config.data.stream.text_field) == (["a"], "text")
    assert config.optimizer.base == {"d_model": 64}
    (config,) = composed(
        BASE, "+data.mixture.a.filespec=x", "++data.mixture.b={filespec:y,weight:2}"
    )
    assert {name: source.weight for name, source in config.data.mixture.items()} == {"a": 1, "b": 2}


UNKNOWN = ["foo=1", "training.foo=1", "training={foo:1}", "data.mixture.a.foo=1"]


@pytest.mark.parametrize("given", [*UNKNOWN, "+foo=1", "++training.foo=1"])
def test_an_unknown_setting_is_refused_in_any_form(given, composed):
    with pytest.raises(SystemExit, match=r"^Error: .*\bfoo\b") as ended:
        composed(BASE, given)
    assert "\n" not in str(ended.value)


OWN = {
    "trainig: {steps: 3}": "there is no setting trainig. Did you mean training?",
    "training: {step: 3}": "there is no setting training.step. Did you mean training.steps?",
    "training: {steps: x}": "training.steps is x; it must be a whole number, or null.",
    "training.steps: 3": "training.steps is not a setting here; write training: {steps: <value>}.",
    "data: {mixture: {a: {weigth: 1}}}": "there is no setting data.mixture.a.weigth. Did you mean",
    "optimizer: {groups: [{mach: x}]}": "there is no setting optimizer.groups[0].mach. Did you "
    "mean",
    "paths: {model_name: 2026_01}": "paths.model_name is 202601; it must be a text, or null. Put "
    "it in quotes.",
    "hardware: {environment: A}": "hardware.environment is A; it must be a mapping",
    "training: [steps]": "In 'mine': ConfigTypeError raised while composing config: Cannot merge",
    "mesh: {d: 1": "configs/mine.yaml",
    "mesh: {d: 1}\nmesh: {t: 1}": "found duplicate key mesh",
    "# \0": "special characters are not allowed",
}


@pytest.mark.parametrize("content", OWN)
def test_a_wrong_file_is_refused_in_one_line(content, tmp_path, composed):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(f"defaults: [base, _self_]\n{content}")
    with pytest.raises(SystemExit) as ended:
        composed("--config-name=mine")
    assert str(ended.value).startswith("Error: ")
    assert OWN[content] in str(ended.value)
    assert "\n" not in str(ended.value)


def test_a_home_directory_is_expanded_in_all_paths(monkeypatch):
    """In lists, mappings and later changes; URLs and texts stay."""
    monkeypatch.setenv("HOME", "/home/me")
    change = "training.changes=[{step: 1, data.filespec: '~/d'}]"
    c = launch.composed(
        "local_test_synthetic", "data.filespec=~/x y", "paths.root_working_dir=~", change
    )
    assert (c.data.filespec, c.paths.root_working_dir) == ("/home/me/x y", "/home/me")
    assert config_at(c, 1).data.filespec == "/home/me/d"
    none = "data.filespec=null", "training.sample_prompts=[~]"
    c = launch.composed("local_test_synthetic", "data.stream.train_files=[~/a,b~,s3://~/c]", *none)
    assert (c.data.stream.train_files, c.training.sample_prompts) == (
        ["/home/me/a", "b~", "s3://~/c"],
        ["~"],
    )
    c = launch.composed("local_test_synthetic", "+data.mixture.a.filespec=~/d", *none)
    assert c.data.mixture["a"].filespec == "/home/me/d"
    with pytest.raises(
        ValueError, match=r"data\.filespec is ~nobody_/d, but there is no such home directory"
    ):
        launch.composed("local_test_synthetic", "data.filespec=~nobody_/d")


@pytest.mark.parametrize(
    "text", ["a b", "it's", "x, y", "{1}", "é=1", 'q"', "$x", "${x}", "null", "1e3"]
)
def test_a_printed_setting_is_the_same_again(text, composed):
    """In a shell."""
    words = shlex.split(
        f"{override('data.filespec', text)} {override('hardware.chip', f'{text}/b')}"
    )
    (config,) = composed(BASE, *words)
    assert (config.data.filespec, config.hardware.chip) == (text, f"{text}/b")


def test_messages_name_commands_as_the_program_was_started(monkeypatch):
    """An editable install runs outside of its checkout, where there is no folder `tools`."""
    text = "run python -m train, python -m tools.plan, or pip install -e '.[eval]'; docs/plan.md"
    assert as_installed(text) == text
    monkeypatch.setattr(sys, "argv", ["shardwright plan"])
    expected = (
        "run shardwright train, shardwright plan, or pip install 'shardwright[eval]'; docs/plan.md"
    )
    assert as_installed(text) == expected


WRITTEN = ["1_1_1", "1e5", "1.10", "yes", "12:30", "true", "017", "0x10", "a b 1", "-.5"]
"""Texts, most of which Hydra or YAML reads as another value."""


def test_what_a_file_has_becomes_the_declared_type(tmp_path, composed):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [local_test_synthetic, override data: numbers, _self_]\n"
        "training: {tokens: 1e9, seed: 1_0, document_mask: no}\n"
        "paths: {model_name: '2_2', checkpoints: null}\n"
        "hardware: {environment: {A: '1_0', B: \"on\"}}\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers.yaml").write_text("filespec: '2026_01'\nskip_steps: [1e1, 11]\n")
    (config,) = composed(f"--config-dir={tmp_path}", "--config-name=mine")
    t, paths, hardware = config.training, config.paths, config.hardware
    assert (t.tokens, t.seed, t.document_mask) == (10**9, 10, False)
    assert (paths.model_name, paths.checkpoints) == ("2_2", None)
    assert hardware.environment == {"A": "1_0", "B": "on"}
    assert (config.data.filespec, config.data.skip_steps) == ("2026_01", [10, 11])


def test_a_text_keeps_what_a_command_line_has(composed):
    """Also in a list. Numbers and truth values have several forms."""
    others = "training.steps=1.5e1", "optimizer.z_loss=1e-4", "training.document_mask=no"
    texts = f"training.sample_prompts=[{', '.join(WRITTEN)}, ' 1', \"a, 1\"]"
    (config,) = composed(BASE, texts, "data.skip_steps=[15e0,2]", *others)
    assert config.training.sample_prompts == [*WRITTEN, " 1", "a, 1"]
    t = config.training
    assert (t.steps, config.data.skip_steps, t.document_mask) == (15, [15, 2], False)
    assert config.optimizer.z_loss == 1e-4
    with pytest.raises(SystemExit, match=r"training\.steps is 1\.5; it must be a whole number"):
        composed(BASE, "training.steps=1.5e0")
    for text in WRITTEN[:5]:
        (config,) = composed(BASE, f"paths.model_name={text}")
        assert config.paths.model_name == text
