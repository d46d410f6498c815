"""What a command line composes and refuses, beside the mistakes of mistakes.txt."""

import sys

import pytest
from hydra import compose, initialize_config_dir

from shardwright.run.checks import register_schema
from shardwright.run.config import Config
from shardwright.run.launch import CONFIGS
from shardwright.run.opening import CheckpointChoice
from shardwright.settings.composing import Program, by_name
from shardwright.settings.program import FULL_ERROR, start
from shardwright.settings.words import as_installed
from shardwright.settings.written import override_as_written, read_as_written

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
        start(Program("python -m train", CONFIGS, None, Config), lambda config: found.append(config))
        return found

    return composed


@pytest.fixture(name="mine")
def _mine(tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mymodel.yaml").write_text("vocab: 1280\n")
    (tmp_path / "mine" / "mine.yaml").write_text("defaults: [local_test_synthetic, _self_]\ntraining: {steps: 5}\n")
    return f"--config-dir={tmp_path}/mine"


def test_configurations_of_config_dir_in_any_order(mine, composed):
    """A list of one value needs no brackets."""
    lists = "data.skip_steps=3", "training.sample_prompts=It is a truth"
    (config,) = composed("training.seed=3", mine, "model=mymodel", "--config-name=mine", *lists)
    assert (config.model.vocab, config.training.steps, config.training.seed) == (1280, 5, 3)
    assert (config.data.skip_steps, config.training.sample_prompts) == ([3], ["It is a truth"])
    with pytest.raises(SystemExit, match=r"model is mymodl; choose one of .*Did you mean mymodel\?"):
        composed(mine, BASE, "model=mymodl")


def test_a_sweep_is_composed_as_a_whole_before_its_first_job(composed):
    swept = "model=glob(de*)", "training.seed=range(1,2)", "data.skip_steps=[1],[2]", "paths.model_name=x"
    found = composed(BASE, "--multirun", *swept)
    assert [(config.training.seed, config.data.skip_steps) for config in found] == [(1, [1]), (1, [2])]
    with pytest.raises(SystemExit, match=r"^Error: training\.seed is x; it must be a whole number"):
        composed(BASE, "--multirun", "training.seed=1,x", "paths.model_name=x")


@pytest.mark.parametrize("value", ["x", "runs/x", "run=x", "run=runs/x"])
def test_a_run_is_found_by_what_a_shell_completes(value, tmp_path, monkeypatch):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "a,b").mkdir()
    monkeypatch.chdir(tmp_path)
    tool = Program("python -m tools.generate", CONFIGS, "generate", CheckpointChoice)
    assert by_name(tool, ["trust=true", value]) == (["trust=true", 'run="runs/x"'], [])
    assert by_name(tool, [value, "runs/a,b"])[0] == ['run=["runs/x","runs/a,b"]']
    assert by_name(tool, ["run=s3://x/y"])[0] == ["run=s3://x/y"]


def test_a_configuration_is_found_by_its_path(mine, composed, tmp_path):
    (config,) = composed("--config-name", f"{tmp_path}/mine/mine.yaml", "model=mymodel")
    assert (config.model.vocab, config.training.steps) == (1280, 5)
    (config,) = composed(mine, f"-cn={CONFIGS}/local_test_synthetic.yaml")
    assert config.training.steps == 50


def test_a_directory_is_read_beside_the_projects_own(mine, composed, tmp_path, monkeypatch):
    """Such as that of an imported model, by the command that the import prints; and it comes first."""
    (tmp_path / "project" / "configs").mkdir(parents=True)
    text = "defaults: [local_test_synthetic, _self_]\ntraining: {steps: %d}\n"
    for name, steps in (("own", 7), ("mine", 8)):
        (tmp_path / "project" / "configs" / f"{name}.yaml").write_text(text % steps)
    monkeypatch.chdir(tmp_path / "project")
    (config,) = composed(mine, "--config-name=own", "model=mymodel")
    assert (config.model.vocab, config.training.steps) == (1280, 7)
    (config,) = composed(mine, "--config-name=mine")
    assert config.training.steps == 5


def test_messages_name_commands_as_the_program_was_started(monkeypatch):
    """An editable install runs outside of its checkout, where there is no folder `tools`."""
    text = "run python -m train, python -m tools.plan, or pip install -e '.[eval]'; docs/plan.md"
    assert as_installed(text) == text
    monkeypatch.setattr(sys, "argv", ["shardwright plan"])
    expected = "run shardwright train, shardwright plan, or pip install 'shardwright[eval]'; docs/plan.md"
    assert as_installed(text) == expected


WRITTEN = ["1_1_1", "1e5", "1.10", "yes", "12:30", "true", "017", "0x10", "a b 1", "-.5"]
"""Texts, all but one of which YAML reads as another value."""


def test_texts_keep_what_a_file_has(tmp_path, composed):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [local_test_synthetic, override data: numbers, _self_]\n"
        f"training: {{tokens: 1e9, seed: 1_0, document_mask: no, sample_prompts: [&a {', '.join(WRITTEN)}, *a]}}\n"
        "paths: {model_name: 2_2, checkpoints: null}\n"
        "hardware: {environment: {A: 1_0, B: on}, compilation_cache: '1e5'}\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers.yaml").write_text("filespec: 2026_01\nskip_steps: [1e1, 11]\n")
    (config,) = composed(f"--config-dir={tmp_path}", "--config-name=mine")
    assert config.training.sample_prompts == [*WRITTEN, WRITTEN[0]]
    t, paths, hardware = config.training, config.paths, config.hardware
    assert (t.tokens, t.seed, t.document_mask) == (10**9, 10, False)
    assert (paths.model_name, paths.checkpoints) == ("2_2", None)
    assert (hardware.environment, hardware.compilation_cache) == ({"A": "1_0", "B": "on"}, "1e5")
    assert (config.data.filespec, config.data.skip_steps) == ("2026_01", [10, 11])


@pytest.mark.parametrize(
    ("value", "written"), [("1.5e1", "15"), ("15e0", "15"), ("1.5e0", "1.5e0"), ("[1e1,1.5e0]", "[10,1.5e0]")]
)
def test_only_whole_numbers_are_made_whole(value, written):
    name = "data.skip_steps" if "[" in value else "training.steps"
    assert override_as_written(Config, f"{name}={value}") == f"{name}={written}"


def test_only_whole_numbers_of_a_file_are_made_whole(tmp_path):
    (tmp_path / "mine.yaml").write_text("training: {steps: 1.5e+0, tokens: 1.5e+1}\ndata: {skip_steps: [1e+1, 2.5]}\n")
    read_as_written(Config, [str(tmp_path)])
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        found = compose("mine")
    assert str(found) == "{'training': {'steps': 1.5, 'tokens': 15}, 'data': {'skip_steps': [10, 2.5]}}"


def test_texts_keep_what_a_command_line_has(composed):
    prompts = f"training.sample_prompts=[{', '.join(WRITTEN)}, ' 1', \"a, 1\"]"
    numbers = "training.steps=1e3", "optimizer.z_loss=1e-4", "training.document_mask=no"
    (config,) = composed(BASE, "paths.model_name=1_1_1", "++hardware.environment.A=1e5", prompts, *numbers)
    assert (config.paths.model_name, config.hardware.environment.A) == ("1_1_1", "1e5")
    assert config.training.sample_prompts == [*WRITTEN, " 1", "a, 1"]
    assert (config.training.steps, config.optimizer.z_loss, config.training.document_mask) == (1000, 1e-4, False)
