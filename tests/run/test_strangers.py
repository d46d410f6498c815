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
import numpy as np
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from shardwright.data.loader import StreamConfig
from shardwright.modeling.model import is_shipped, load_model
from shardwright.modeling.weights import shapes_of
from shardwright.program.changes import steps_of, tokens_before
from shardwright.program.checkpoint import Checkpointer
from shardwright.program.files import read_config
from shardwright.program.mesh_choice import StagesChoice
from shardwright.program.resume import open_run, read_weights
from shardwright.program.saved_config import check_resumes, config_of, saved_config
from shardwright.program.step import trace_step
from shardwright.settings.settings import made
from shardwright.tools import checkpoint_to_huggingface, evaluate
from shardwright.tools.generate import MeshChoice, Settings, generate
from shardwright.tools.replay import __main__ as replay
from shardwright.tools.replay.session import opened
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


SPELLED = "runs.evil.payload:main", "runs.evil.payload", "runs.evil.payload:", "x.y: main"
NAMED = [("optimizer", {"algorithm": name}) for name in SPELLED]
NAMED += [("optimizer", {name: SPELLED[0]}) for name in ("loss", "schedule")]
NAMED += [("optimizer", {"groups": [{"match": "*", "algorithm": SPELLED[0]}]})]
NAMED += [("trackers", {"names": [name]}) for name in SPELLED[:2]]
NAMED += [("trackers", {"names": SPELLED[0]}), ("trackers", {"names": {SPELLED[0]: 1}})]


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


@pytest.mark.quick
def test_what_is_shipped():
    others = (
        "models.gpt2",
        "models",
        "runs.evil.payload",
        "json",
        "shardwright.run.x",
        "tests/../runs/evil",
    )
    names = ("train", "gpt2", *others, "", "gpt2.", "../train")
    assert [name for name in names if is_shipped(name)] == ["train", "gpt2"]


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


WRONG = [
    (
        {"provenance": {"source": {"train.py": [1]}, "programs": {}, "traced_by": ""}},
        "provenance.source.train.py is [1]",
    ),
    ({"provenance": {"source": {}, "programs": {}}}, "provenance.traced_by is missing"),
    ({"loader": {"step": "x"}}, "loader.step is 'x'"),
    ({"skips": {"recent": [["a", 1.0]]}}, "skips.recent is 'a'"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_metadata_of_another_type_is_refused_by_name(stranger, changes, message):
    with pytest.raises(
        ValueError, match=re.escape(f"the checkpoint's metadata: {message}; it must be")
    ) as error:
        saved_config(stranger.content["attributes"]["metadata"] | changes)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: " + "[" * 10**4, "cannot be read"),
        (
            "model: !!python/object/apply:os.system ['true']",
            "cannot be read: could not determine a constructor",
        ),
        ("[1, 2]", "has no configuration of a run"),
        ("model: 3", "has no configuration of a run"),
        ("model: {when: 2020-01-01}", "a value that is not a setting"),
        ("model: \xff", "has no configuration of a run"),
        ("\x00", "cannot be read"),
        (
            "a: &a {x: [1]}\nb: *a",
            r"cannot be read: it repeats a part, \*a, instead of writing it again\. Copy",
        ),
        ("model: {x: !!timestamp soon}", "cannot be read"),
    ],
)
def test_a_config_yaml_that_is_none_is_refused_in_one_line(text, message, tmp_path):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path / "config.yaml")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_config_yaml_of_aliases_ends(tmp_path):
    """Each part has ten of the one before: a hundred bytes more, and it is ten times as long."""
    parts = [
        f"a{i}: &a{i} {{{', '.join(f'x{j}: *a{i - 1}' for j in range(10))}}}" for i in range(1, 12)
    ]
    (tmp_path / "config.yaml").write_text("\n".join(["a0: &a0 {x: 0}", *parts]))
    with pytest.raises(ValueError, match=r"it repeats a part, \*a0"):
        read_config(tmp_path / "config.yaml")


@pytest.mark.quick
def test_a_checkpoint_without_a_configuration_is_refused():
    for metadata in (None, [], {}, {"config": 3}, {"config": {"model": []}}):
        with pytest.raises(ValueError, match="has no configuration of a run"):
            saved_config(metadata)


CHANGES = [{"step": i + 1, "optimizer.learning_rate": 0.1} for i in range(1000)]
ODD = [
    ("model", None, "config.model is missing; it must be an object"),
    (
        "pipeline",
        {"schedule": ["gpipe"]},
        "config.pipeline.schedule is ['gpipe']; it must be a text",
    ),
    ("training", {"changes": CHANGES}, "training.changes has 1,000 entries; leave at most 128"),
    (
        "training",
        {"changes": [{"step": 1, "data.mixture.a": 3, "data.mixture.a.b": 3}]},
        "a.b is in no section",
    ),
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


@pytest.mark.parametrize(
    ("changes", "message"), [([1], "changes is 1; it must be an object"), (CHANGES, "1,000 en")]
)
def test_changes_of_a_config_yaml_are_refused_in_one_line(stranger, changes, message):
    """Replay reads the one beside the checkpoints too."""
    run = stranger.write()
    (stranger.directory / "config.yaml").write_text(json.dumps({"training": {"changes": changes}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shardwright.tools.replay.session.read_config",
            lambda path: json.loads(path.read_text()),
        )  # at once
        with (
            pytest.raises(ValueError, match=message),
            opened(run, 3, StagesChoice(), False, False, print),
        ):
            pass


def test_tokens_before_a_step_of_many_changes():
    """Computed step by step, and at once by numbers that the search for the last step tries."""
    c = tiny.config()
    sizes = {0: 64, 7: 32, 9: 128}
    c.training.changes = [
        {"step": step, "training.seq_len": size} for step, size in sizes.items() if step
    ]

    def size(step):
        return c.training.batch_size * sizes[max(first for first in sizes if first <= step)]

    c.training.seq_len = sizes[0]
    for step in (0, 1, 7, 8, 12):
        tokens = sum(map(size, range(step)))
        assert tokens_before(c, step) == tokens
        assert steps_of(c, tokens) == step


def test_weights_that_are_not_finite_are_told(stranger):
    """A run writes none; a stranger may."""
    run, lines = stranger.write(), []
    with open_run(run, None, False) as saved, jax.set_mesh(tiny.mesh("d=8")):
        like = shapes_of(load_model(saved.config.model).table)
        state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        state.embed[3, 1] = np.nan
    with Checkpointer(f"{run}/checkpoints") as checkpoints:
        checkpoints.save(5, {"weights": jax.tree.map(jax.numpy.asarray, state)}, saved.metadata)
    with open_run(run, 5, False) as saved, jax.set_mesh(tiny.mesh("d=8")):
        saved.read_weights(load_model(saved.config.model), True, lines.append)
    assert "embed is not finite: texts and losses of these weights are meaningless" in lines[-1]


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
    (
        "data",
        {
            "filespec": None,
            "stream": {"train_files": ["x"], "tokenizer_kind": "tiktoken", "tokenizer": "gpt2"},
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
OPENED += [(opener, *ADDRESSES[0]) for opener in ("export", "evaluate", "replay")]


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
        for other in ("init_from", "report"):  # which read no data of the run
            with contextlib.suppress(ValueError):
                OPENERS[other](stranger)
        assert server.requests == []


def test_a_trusted_address_is_opened(stranger):
    with LocalServer(Counting) as server:
        run = stranger.write(data__filespec=f"{server.url}/x", data__stream=None)
        with pytest.raises(ValueError, match=r"cannot read the tokenizer of the dataset http"):
            generate(Settings(run=run, trust=True, prompt="a"), QUIET)
        assert server.requests


def test_a_tokenizer_beside_the_user_is_no_address(stranger, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    stream = {"train_files": ["x"], "tokenizer_kind": "huggingface", "tokenizer": "tokenizer.json"}
    run = stranger.write(data__filespec=None, data__stream=stream)
    with open_run(run, None, False) as saved:
        assert saved.config.data.stream.tokenizer == "tokenizer.json"
