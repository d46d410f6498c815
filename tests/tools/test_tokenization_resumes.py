"""A run that was ended at any moment goes on with the same command, and ends with the bytes of one that was not."""

import os
import random
import shlex
import signal
import subprocess
import time

import pytest

from shardwright.data.flat_tokens import Writer, work_on
from shardwright.data.text import definitions
from shardwright.data.text.worker_pool import map_in_order
from shardwright.tools import huggingface_to_flat_tokens as tool
from shardwright.tools.huggingface_to_flat_tokens import TokenizerConfig
from tests.support.tokenization import config, driver, random_texts, small, tree, write_jsonl

__all__ = ["small"]


class Killed(BaseException):
    pass


def kill_after(monkeypatch, num_states):
    """The run ends, without a chance to clean up in what it writes, when it has written its state so often."""
    save = Writer.save

    def killed(self, place):
        nonlocal num_states
        save(self, place)
        num_states -= 1
        if num_states == 0:
            raise Killed

    monkeypatch.setattr(Writer, "save", killed)


def run_killed(monkeypatch, run, out, num_states):
    """Runs until the end, each time for so many states; returns how often the run was killed."""
    for kills in range(200):
        with monkeypatch.context() as patch:
            kill_after(patch, num_states)
            try:
                run(out)
                return kills
            except Killed:
                assert (out / "unfinished.json").exists()
    raise AssertionError("it does not end")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bytes", pytest.param("train_bpe", marks=pytest.mark.slow)])
def test_every_place_to_stop(tmp_path, small, monkeypatch, kind):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(90))
    tokenizer = TokenizerConfig(kind=kind, vocab_size=280)

    def run(out):
        tool.run(config(out, [source], tokenizer=tokenizer, train_max_tokens=5000, validation_max_documents=40))

    run(tmp_path / "unbroken")
    expected = tree(tmp_path / "unbroken")
    assert len(expected) > 12
    stopped = 0
    for step in (1, 2, 3, 7, 19):
        out = tmp_path / f"stopped_{step}"
        stopped += run_killed(monkeypatch, run, out, step)
        assert tree(out) == expected
    assert stopped > 30


@pytest.mark.slow
def test_killed_processes(tmp_path, small):
    """SIGKILL, once the first states are written; the workers end too."""
    rng = random.Random(0)
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(400))
    tool.run(config(tmp_path / "unbroken", [source], validation_max_documents=20))
    command, env = driver(tmp_path, 0.02)
    settings = [f"train.files=[{source}]", f"validation.files=[{source}]", "validation.max_documents=20"]
    out = tmp_path / "killed"
    run = [*command, f"out={out}", *settings, "tokenizer.end_token='</s>'", "num_workers=2"]
    for _ in range(4):
        with subprocess.Popen(run, env=env, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True) as p:
            while p.poll() is None and not (out / "unfinished_train.npz").exists():
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
            p.kill()
        deadline = time.monotonic() + 20
        while processes_of(p.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_of(p.pid)
    if (out / "unfinished.json").exists():
        subprocess.run(run, env=env, cwd=tmp_path, check=True)
    assert tree(out) == tree(tmp_path / "unbroken"), "not the bytes of the unbroken run"


def processes_of(session):
    """The processes of a session, which is named by the id of its first one."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, _, _, its_session = file.read().rsplit(")", 1)[1].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(pid))
    return found


@pytest.mark.parametrize("kind", ["gz", "parquet", pytest.param("huggingface", marks=pytest.mark.long)])
def test_every_source_goes_on(tmp_path, small, monkeypatch, kind):
    texts = random_texts(60)
    settings = {}
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        source = str(tmp_path / "a.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), source, row_group_size=5)
    else:
        (tmp_path / "data").mkdir()
        source = write_jsonl(tmp_path / "data/a.jsonl", texts)
        if kind == "gz":
            subprocess.run(["gzip", source], check=True)
            source += ".gz"
        else:
            pytest.importorskip("datasets")
            settings |= {"dataset": str(tmp_path / "data"), "train_source": "train"}
            source = None

    def run(out):
        made = config(out, [source] if source else [], **settings)
        made.validation = None
        tool.run(made)

    run(tmp_path / "unbroken")
    run_killed(monkeypatch, run, tmp_path / "stopped", 2)
    assert tree(tmp_path / "stopped") == tree(tmp_path / "unbroken")


def stopped(tmp_path, monkeypatch, **settings):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    with monkeypatch.context() as patch:
        kill_after(patch, 3)
        with pytest.raises(Killed):
            tool.run(config(tmp_path / "d", [source], **settings))
    return source


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": TokenizerConfig()}, "tokenizer.end_token was </s>, is None"),
        ({"train_max_tokens": 5}, "train.max_tokens was None, is 5"),
        ({"validation_skip_documents": 1}, "validation.skip_documents was 0, is 1"),
        ({"files": 2}, r"train.files was \[.*a.jsonl'\], is \[.*b.jsonl'\]"),
    ],
)
def test_other_settings_are_refused(tmp_path, small, monkeypatch, change, message):
    source = stopped(tmp_path, monkeypatch)
    (tmp_path / "b.jsonl").write_text('{"body": "more"}\n')
    other = write_jsonl(tmp_path / "b.jsonl", ["more"])
    change = dict(change)
    files = [source, other][: change.pop("files", 1)]
    before = tree(tmp_path / "d")
    with pytest.raises(
        ValueError, match=f"is unfinished and was started with other settings: {message}. Give the same"
    ):
        tool.run(config(tmp_path / "d", files, **change))
    assert tree(tmp_path / "d") == before
    # What the result does not depend on may be another.
    tool.run(config(tmp_path / "d", [source], num_workers=2))
    tool.run(config(tmp_path / "unbroken", [source]))
    assert tree(tmp_path / "d") == tree(tmp_path / "unbroken")


@pytest.mark.long
def test_a_changed_source_is_refused(tmp_path, small, monkeypatch):
    source = stopped(tmp_path, monkeypatch)
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r"train.files found was .*a.jsonl, \d+ bytes of .*, is .*, \d+ bytes"):
        tool.run(config(tmp_path / "d", [source]))
    tool.run(config(tmp_path / "d", [source], overwrite=True))
    tool.run(config(tmp_path / "new", [source]))
    assert tree(tmp_path / "d") == tree(tmp_path / "new")


def test_another_tokenizer_of_the_same_name_is_refused(tmp_path, small, monkeypatch):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(definitions.train_bpe(random_texts(60), 270))
    tokenizer = TokenizerConfig(kind="huggingface", name=str(path))
    source = stopped(tmp_path, monkeypatch, tokenizer=tokenizer)
    path.write_text(definitions.train_bpe(random_texts(60), 275))
    with pytest.raises(ValueError, match=r"other settings: tokenizer.json was [0-9a-f]{64}, is [0-9a-f]{64}"):
        tool.run(config(tmp_path / "d", [source], tokenizer=tokenizer))


@pytest.mark.parametrize("last", ["train", "validation"])
def test_a_finished_split_is_not_written_again(tmp_path, small, monkeypatch, capsys, last):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    with monkeypatch.context() as patch:
        close = Writer.close

        def killed(self):
            close(self)
            if self.path.endswith(last):
                raise Killed

        patch.setattr(Writer, "close", killed)
        with pytest.raises(Killed):
            tool.run(config(tmp_path / "d", [source]))

    def times(split):
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "d" / split).rglob("*")}

    begun = (tmp_path / "d/unfinished.json").read_bytes()
    before = times(last)
    tool.run(config(tmp_path / "d", [source]))
    assert before == times(last)
    assert f"d/{last}: complete" in capsys.readouterr().out
    # After the end too, and while the last files are deleted.
    before, whole = times(""), tree(tmp_path / "d")
    tool.run(config(tmp_path / "d", [source]))
    told = [f"{tmp_path}/d/{name}: complete\n" for name in ("train", "validation")]
    assert capsys.readouterr().out.startswith("".join([*told, "vocabulary: "]))
    (tmp_path / "d/unfinished.json").write_bytes(begun)
    tool.run(config(tmp_path / "d", [source]))
    assert tree(tmp_path / "d") == whole
    assert times("train") | times("validation") == {path: before[path] for path in times("train") | times("validation")}
    with pytest.raises(ValueError, match="d/train exists already"):
        tool.run(config(tmp_path / "d", [source], train_max_tokens=50))
    tool.run(config(tmp_path / "d", [source], overwrite=True))
    assert times("train") != {path: before[path] for path in times("train")}
    assert tree(tmp_path / "d") == whole


def test_two_processes_do_not_write_one_dataset(tmp_path, small):
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(6))
    message = r"Another process is writing .*d\. Wait for it or end it"
    with work_on(str(tmp_path / "d"), {}, [], overwrite=False), pytest.raises(ValueError, match=message):
        tool.run(config(tmp_path / "d", [source]))
    tool.run(config(tmp_path / "d", [source]))


@pytest.mark.long
def test_a_late_error_can_be_gone_on_from(tmp_path, small):
    """A full disk, made of a limit on the size of files, is named; with room again the same command goes on."""
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(60))
    tool.run(config(tmp_path / "unbroken", [source]))
    command, env = driver(tmp_path, 0)
    run = [*command, f"out={tmp_path}/d", f"train.files=[{source}]", f"validation.files=[{source}]"]
    run += ["tokenizer.end_token='</s>'", "num_workers=1"]
    limit = f"ulimit -f 2; exec {shlex.join(run)}"
    result = subprocess.run(["bash", "-c", limit], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "File too large" in result.stderr
    subprocess.run(run, env=env, cwd=tmp_path, check=True)
    assert tree(tmp_path / "d") == tree(tmp_path / "unbroken")


# ---- processes ----------------------------------------------------------------------------------------------------


def square(x):
    time.sleep(0.001 * (x % 7))
    if x == 1000:
        raise ValueError(f"{x} is too much")
    if x == 2000:
        os.kill(os.getpid(), signal.SIGKILL)
    return x * x


@pytest.mark.parametrize("num_items", [0, 40])
def test_results_are_in_order_and_few_are_held(num_items):
    taken = 0

    def items():
        nonlocal taken
        for i in range(num_items):
            taken += 1
            yield i

    for done, found in enumerate(map_in_order(square, items(), 2)):
        assert found == (done, done * done)
        assert taken <= done + 3 * 2
    assert taken == num_items


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (1000, "1000 is too much"),
        pytest.param(2000, "One of 2 processes was killed, maybe because memory ran out", marks=pytest.mark.long),
    ],
)
def test_errors_in_processes_are_raised(item, message):
    with pytest.raises(ValueError, match=message):
        list(map_in_order(square, [*range(20), item, *range(20)], 2))
