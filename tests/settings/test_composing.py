"""What the check of a command line takes and refuses, as Hydra does: --config-dir, --config-path, sweeps."""

import re
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper

from shardwright.run.config import Config, register_schema
from shardwright.run.launch import CONFIGS
from shardwright.settings.composing import Program, check_command, parse_arguments, readable
from tools.huggingface_to_flat_tokens import config as tool

ROOT = Path(__file__).parents[2]
BASE = "--config-name=local_test_synthetic"


def check(*arguments):
    register_schema()
    program = Program("python -m train", CONFIGS, None, Config)
    check_command(program, parse_arguments(program, arguments))


@pytest.fixture(name="mine")
def _mine(tmp_path):
    for name in ("model", "mygroup"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "mymodel.yaml").write_text("vocab: 1280\n")
    (tmp_path / "mygroup" / "x.yaml").write_text("# @package _global_\ntraining:\n  steps: 3\n")
    (tmp_path / "mine.yaml").write_text("defaults: [local_test_synthetic, _self_]\ntraining: {steps: 5}\n")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        (BASE, "model=mymodel"),
        (BASE, "+mygroup=x"),
        (BASE, "--multirun", "model=mymodel,demo"),
        (BASE, "--multirun", "model=glob(my*)"),
        ("--config-name=mine", "model=mymodel"),
    ],
)
def test_configurations_of_config_dir(mine, arguments):
    check(f"--config-dir={mine}", *arguments)


def test_what_config_dir_lacks(mine):
    with pytest.raises(ValueError, match=r"model is mymodl; choose one of .*Did you mean mymodel\?"):
        check(f"--config-dir={mine}", BASE, "model=mymodl")
    with pytest.raises(ValueError, match=rf"configs/ and {mine.name}/ has no min.yaml. Did you mean mine\?"):
        check(f"--config-dir={mine}", "--config-name=min")
    with pytest.raises(ValueError, match=r"model is mymodel; choose one of"):  # the directory belongs to one command
        check(BASE, "model=mymodel")


def test_a_config_path_replaces_the_directory(mine):
    (mine / "alone.yaml").write_text("defaults: [config_schema, _self_]\ntraining: {steps: 5}\n")
    check(f"--config-path={mine}", "--config-name=alone", "+mygroup=x")
    with pytest.raises(ValueError, match=r"has no local_text\.yaml"):
        check(f"--config-path={mine}", "--config-name=local_text")


@pytest.mark.parametrize("sweep", ["model=glob(8*)", "training.seed=range(1,4)", "training.seed=shuffle(1,2)"])
def test_sweeps(sweep):
    check(BASE, "--multirun", sweep)


def test_a_sweep_without_values():
    with pytest.raises(ValueError, match=r"model is glob\(9\*\), which has no values"):
        check(BASE, "--multirun", "model=glob(9*)")


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        (
            ["training.steps=range(1,1000000000000)"],
            r"range\(1,1000000000000\); a sweep must have at most 1,000 values",
        ),
        (["training.steps=shuffle(range(1,1000000000000))"], "must have at most 1,000 values"),
        (["optimizer.learning_rate=range(0,1,1e-300)"], "must have at most 1,000 values"),
        (["training.steps=range(1,100)", "training.seed=range(0,100)"], "the sweep has 9,900 runs"),
        (["training.steps=range(1,9,0)"], r"range\(1,9,0\): range\(\) arg 3 must not be zero"),
    ],
)
def test_a_sweep_is_bounded(sweep, said):
    with pytest.raises(ValueError, match=said):
        check(BASE, "--multirun", *sweep)


@pytest.mark.parametrize("mode", ["--multirun", "hydra.mode=MULTIRUN"])
def test_a_tool_that_does_not_sweep(mode):
    program = Program(
        "python -m tools.x", ROOT / "tools" / "configs", "huggingface_to_flat_tokens", tool.Config, sweeps=False
    )
    ConfigStore.instance().store("huggingface_to_flat_tokens_schema", tool.Config)
    with pytest.raises(ValueError, match=r"MULTIRUN|--multirun is given. `python -m tools.x` runs once for a command"):
        check_command(program, parse_arguments(program, [mode, "out=x"]))


def test_an_interval_is_for_a_sweeper_that_reads_it(mine):
    sweep = ("--multirun", "optimizer.learning_rate=interval(1,2)")
    with pytest.raises(ValueError, match=r"optimizer.learning_rate is interval\(1,2\), which only a sweeper"):
        check(BASE, *sweep)
    (mine / "hydra" / "sweeper").mkdir(parents=True)
    (mine / "hydra" / "sweeper" / "own.yaml").write_text(f"_target_: {Sweeper.__module__}.Sweeper\n")
    check(f"--config-dir={mine}", BASE, *sweep, "hydra/sweeper=own")
    with pytest.raises(ValueError, match=r"Did you mean training.steps\?"):
        check(f"--config-dir={mine}", BASE, *sweep, "hydra/sweeper=own", "training.step=3")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.stream={seed:3}", "cannot set data.stream={seed:3}: it is null, and only a configuration makes"),
        ("+data.mixture.a.filespec=x", "has no entry a. Give the entry as a whole: '+data.mixture={a: {filespec: …, "),
        (
            "+data.mixture.a={filespec: x}",
            "has no entry a. Give the entry as a whole: '+data.mixture={a: {filespec: …, ",
        ),
        ("data.mixture.a.filespec=x", "has no entry a. Give the entry as a whole: '+data.mixture={a: {filespec: …, "),
    ],
)
def test_sections_that_are_not_there(setting, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(BASE, setting)


def test_an_entry_is_added_as_the_message_says():
    check(BASE, "data.filespec=null", "+data.mixture={a: {filespec: x, weight: 1}}")


def test_a_setting_of_a_section_that_is_null():
    program = Program("python -m tools.x", ROOT / "tools" / "configs", "huggingface_to_flat_tokens", tool.Config)
    ConfigStore.instance().store("huggingface_to_flat_tokens_schema", tool.Config)
    arguments = ["validation=null", "validation.skip_documents=3"]
    with pytest.raises(ValueError, match=r"^cannot set validation.skip_documents=3: it is null, and only"):
        check_command(program, parse_arguments(program, arguments))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argument", "read"),
    [
        ("paths.root_working_dir=~/runs", '"~/runs"'),
        ("paths.model_name=première course", '"première course"'),
        ("paths.model_name=plain-1.0", None),
        ("data.filespec=[é]", None),
        ("x='é'", None),
        ("~training.seed", None),
        ("--config-dir=~/é", None),
    ],
)
def test_values_that_hydra_reads_in_quotes_alone_get_them(argument, read):
    name = argument.partition("=")[0]
    assert readable(argument) == (argument if read is None else f"{name}={read}")
