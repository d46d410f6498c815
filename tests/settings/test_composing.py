"""What a command line composes and refuses: --config-dir, --config-path, sweeps."""

import re
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from shardwright.run.config import Config, register_schema
from shardwright.run.launch import CONFIGS
from shardwright.settings.composing import Program, composed, parse_arguments, readable
from tools.huggingface_to_flat_tokens import config as tool

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


@pytest.mark.parametrize("sweep", ["model=glob(9*)", "training.steps=range(1,1000000000000)"])
def test_a_sweep_has_values_and_not_too_many(sweep):
    with pytest.raises(ValueError, match=r"has too many values or none; give 1 to 1,000"):
        check(BASE, "--multirun", sweep)


def test_a_wrong_value_of_a_sweep():
    with pytest.raises(ValueError, match=r"training.seed is x; it must be a whole number"):
        check(BASE, "--multirun", "training.seed=1,x", "training.steps=range(1,4)")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.stream={seed:3}", "a setting is given of a section that is null ("),
        ("+data.mixture.a.filespec=x", "Error merging override +data.mixture.a.filespec=x: Invalid type assigned"),
        (
            "+data.mixture.a={filespec: x}",
            "Error merging override +data.mixture.a={filespec: x}: Invalid type",
        ),
        ("data.mixture.a.filespec=x", "Could not override 'data.mixture.a.filespec': Key 'a' is not in struct"),
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
    with pytest.raises(
        ValueError, match=r"NoneType \(validation=null, validation.skip_documents=3\). Correct the setting"
    ):
        composed(program, parse_arguments(program, arguments))


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
