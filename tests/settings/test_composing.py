"""What a command line composes and refuses: --config-dir, --config-path, sweeps."""

import re
from pathlib import Path

import pytest

from shardwright.run.config import Config, register_schema
from shardwright.run.launch import CONFIGS
from shardwright.settings.composing import Program, composed, parse_arguments, readable

ROOT = Path(__file__).parents[2]
BASE = "--config-name=local_test_synthetic"


def check(*arguments):
    register_schema()
    program = Program("python -m train", CONFIGS, None, Config)
    composed(program, parse_arguments(program, arguments))


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--multirun", "model=glob(9*)"], "model=glob(9*) has no values. Give some"),
        (["--multirun", "training.seed=1,x"], "training.seed is x; it must be a whole number"),
        (["+data.mixture.a.filespec=x"], "Error merging override +data.mixture.a.filespec=x: Invalid type assigned"),
        (["data.mixture.a.filespec=x"], "Could not override 'data.mixture.a.filespec': Key 'a' is not in struct"),
    ],
)
def test_what_does_not_compose_is_said(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(BASE, *arguments)


def test_an_entry_is_added_as_the_message_says():
    check(BASE, "data.filespec=null", "+data.mixture={a: {filespec: x, weight: 1}}")


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
