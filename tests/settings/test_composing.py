"""What a command line composes and refuses, beside the mistakes of mistakes.txt."""

import shlex
import sys

import pytest

from shardwright.program.changes import config_at
from shardwright.program.checks import register_schema
from shardwright.program.config import Config
from shardwright.run import launch
from shardwright.run.launch import CONFIGS
from shardwright.settings.command_line import Program
from shardwright.settings.output import override
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


def test_a_null_section_is_made_by_its_first_setting(composed):
    mixture = "+data.mixture.a.filespec=x", "++data.mixture.b={filespec:y,weight:2}"
    (config,) = composed(BASE, "data.stream.train_files=[a]", "optimizer.base.d_model=64", *mixture)
    assert (config.data.stream.train_files, config.data.stream.text_field) == (["a"], "text")
    assert config.optimizer.base == {"d_model": 64}
    assert {name: source.weight for name, source in config.data.mixture.items()} == {"a": 1, "b": 2}


OWN = {
    "trainig: {steps: 3}": "there is no setting trainig. Did you mean training?",
    "training.steps: 3": "training.steps is not a setting here; write training: {steps: <value>}.",
    "optimizer: {groups: [{mach: x}]}": "there is no setting optimizer.groups[0].mach. Did you "
    "mean",
    "paths: {model_name: 2026_01}": "paths.model_name is 202601; it must be a text, or null. Put "
    "it in quotes.",
    "mesh: {d: 1}\nmesh: {t: 1}": "found duplicate key mesh",
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
    others = "data.stream.train_files=[~/a,b~,s3://~/c]", "training.sample_prompts=[~]"
    c = launch.composed(
        "local_test_synthetic",
        "data.filespec=~/x y",
        "+data.mixture.a.filespec=~/d",
        change,
        *others,
    )
    assert (c.data.filespec, c.data.mixture["a"].filespec) == ("/home/me/x y", "/home/me/d")
    assert config_at(c, 1).data.filespec == "/home/me/d"
    assert c.data.stream.train_files == ["/home/me/a", "b~", "s3://~/c"]
    assert c.training.sample_prompts == ["~"]


TEXTS = ["a b", "it's", "x, y", "{1}", "é=1", 'q"', "$x", "${x}", "null", "1e3"]


def test_a_printed_setting_is_the_same_again(composed):
    """In a shell."""
    words = [override(f"+hardware.environment.A{i}", text) for i, text in enumerate(TEXTS)]
    (config,) = composed(BASE, *shlex.split(" ".join(words)))
    assert [*config.hardware.environment.values()] == TEXTS


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
