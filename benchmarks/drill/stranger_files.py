"""Runs and models of a stranger, read by each tool: nothing in them is executed, sent or shown as it is."""

import functools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
from omegaconf import OmegaConf

from benchmarks.drill.cases import Field, Finding, Kind, selection
from benchmarks.drill.corruptions import nested
from benchmarks.drill.runs import ONE, ROOT, STEPS, TINY, arrays, environment, shortened, unkilled
from benchmarks.steps import simulate_devices
from training_io.checkpoint import Checkpointer

SECRET = "drill-secret-41f7"
EVIL = "runs.evil.payload"
"""A module that lies where a tool is started, and that the user has not named."""
MARKUP = "\x1b]0;drill\x07\u202e<img src=x onerror=drill>"
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
DEEP = "[" * 100_000 + "]" * 100_000
LIMIT_S = 180.0


class Listener:
    """A server that remembers what it is sent, until the context ends."""

    def __enter__(self) -> "Listener":
        self.heard: list[str] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(2)
                try:
                    self.heard.append(connection.recv(1000).decode(errors="replace").partition("\r\n")[0])
                except OSError:
                    self.heard.append("a connection")

    def __exit__(self, *exc_info) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


# ---- what a stranger gives -----------------------------------------------------------------------------------------


def resave(run: Path, change: Callable[[dict], object]) -> None:
    """Writes the last checkpoint and config.yaml of a run again, with the configuration that `change` changes."""
    simulate_devices(4)
    manifest = json.loads((run / "checkpoints" / f"{STEPS:010}" / "zarr.json").read_text())["attributes"]
    state = nested({name: jax.numpy.asarray(array) for name, array in arrays(run, STEPS).items()})
    change(manifest["metadata"]["config"])
    shutil.rmtree(run / "checkpoints")
    with Checkpointer(run / "checkpoints") as checkpoints:
        checkpoints.save(STEPS, state, manifest["metadata"])
    OmegaConf.save(OmegaConf.create(manifest["metadata"]["config"]), run / "config.yaml")


def edit(path: Path, old: str, new: str) -> None:
    """Replaces the first `old` in a file."""
    path.write_text(path.read_text().replace(old, new, 1))


def module(run: Path, url: str) -> None:
    """model.module names a module of the stranger."""
    resave(run, lambda config: config["model"].update(module=EVIL))


def schedule(run: Path, url: str) -> None:
    """pipeline.schedule names a function of the stranger."""
    resave(run, lambda c: (c["pipeline"].update(schedule=f"{EVIL}:main"), c["mesh"].update(p=2, d=2, t=1)))


def secret_in_url(run: Path, url: str) -> None:
    """data.filespec is a URL with a secret of the environment in it."""
    resave(run, lambda config: config["data"].update(filespec=url + "/${oc.env:DRILL_SECRET}"))


def secret_in_name(run: Path, url: str) -> None:
    """Settings that are shown interpolate a secret of the environment."""
    name = "${oc.env:DRILL_SECRET}"
    resave(run, lambda c: (c["paths"].update(model_name=name), c["model"].update(module=name)))


def other_url(run: Path, url: str) -> None:
    """data.filespec and training.init_from are URLs."""
    resave(run, lambda c: (c["data"].update(filespec=url + "/data"), c["training"].update(init_from=url + "/run")))


def markup(run: Path, url: str) -> None:
    """Settings, samples and metrics have control characters and markup."""
    resave(run, lambda c: (c["paths"].update(model_name=MARKUP), c["hardware"].update(name=MARKUP)))
    shown = json.dumps({"step": STEPS - 1, "event": "validation", "loss": MARKUP, MARKUP: MARKUP}, ensure_ascii=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(shown + "\n" + json.dumps({"step": STEPS, "loss": 1.0, MARKUP: 1.0}) + "\n")


def escaping_names(run: Path, url: str) -> None:
    """An array's name leads out of the checkpoint."""
    edit(run / "checkpoints" / f"{STEPS:010}" / "zarr.json", '"weights/embed"', '"weights/../../../../../stolen/embed"')


def deep_manifest(run: Path, url: str) -> None:
    """The manifest is nested a hundred thousand deep."""
    edit(run / "checkpoints" / f"{STEPS:010}" / "zarr.json", '"metadata": {', f'"metadata": {{"deep": {DEEP},')


def deep_config(run: Path, url: str) -> None:
    """config.yaml is nested a hundred thousand deep."""
    (run / "config.yaml").write_text(f"model: {DEEP[45_000:-45_000]}\n")


def deep_metrics(run: Path, url: str) -> None:
    """A line of metrics.jsonl is nested a hundred thousand deep, one has a number of a million digits."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 9, "loss": {DEEP}}}\n{{"step": {"9" * 1_000_000}, "loss": 1}}\n')


def pipes(run: Path, url: str) -> None:
    """config.yaml, the logs and the manifest are pipes."""
    for path in _read_first(run):
        path.unlink(missing_ok=True)
        os.mkfifo(path)


def sparse(run: Path, url: str) -> None:
    """config.yaml, the samples and the manifest have 1 TiB, and take no room on the disk."""
    for path in _read_first(run):
        if path.name != "metrics.jsonl":
            path.touch()
            os.truncate(path, 2**40)


def _read_first(run: Path) -> list[Path]:
    names = ("config.yaml", "metrics.jsonl", "samples.jsonl")
    return [run / "checkpoints" / f"{STEPS:010}" / "zarr.json", *(run / name for name in names)]


def pipe_of_weights(model: Path, url: str) -> None:
    """The safetensors are a pipe."""
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")


def sparse_model_config(model: Path, url: str) -> None:
    """config.json has 1 TiB."""
    os.truncate(model / "config.json", 2**40)


def device_of_tokenizer(model: Path, url: str) -> None:
    """tokenizer.json is an endless device."""
    (model / "tokenizer.json").unlink(missing_ok=True)
    (model / "tokenizer.json").symlink_to("/dev/zero")


def outside_index(model: Path, url: str) -> None:
    """The index of the safetensors names a file outside of the directory."""
    (model / "model.safetensors").rename(model.with_name("outside.safetensors"))
    names = list(json.loads(_header(model.with_name("outside.safetensors")))) if model.exists() else []
    weights = {name: "../outside.safetensors" for name in names if name != "__metadata__"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return file.read(size)


def type_of_module(model: Path, url: str) -> None:
    """model_type and auto_map name a module of the stranger."""
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": EVIL, "auto_map": {"AutoModelForCausalLM": f"{EVIL}.main"}}
    (model / "config.json").write_text(json.dumps(config))


def deep_model_config(model: Path, url: str) -> None:
    """config.json is nested a hundred thousand deep."""
    edit(model / "config.json", "{", f'{{"deep": {DEEP},')


def long_header(model: Path, url: str) -> None:
    """The safetensors announce a header of 2**60 bytes."""
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def deep_header(model: Path, url: str) -> None:
    """The header of the safetensors is nested a hundred thousand deep."""
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode() + path.read_bytes())


RUNS = (
    module,
    schedule,
    secret_in_url,
    secret_in_name,
    other_url,
    markup,
    escaping_names,
    deep_manifest,
    deep_config,
    deep_metrics,
    pipes,
    sparse,
)
REFUSED = (
    *(outside_index, type_of_module, long_header, deep_header),
    *(pipe_of_weights, sparse_model_config, device_of_tokenizer),
)
"""Models that must not become a checkpoint."""
MODELS = (*REFUSED, deep_model_config)

# ---- the tools -----------------------------------------------------------------------------------------------------


def commands() -> dict[str, list[str]]:
    """The tools that read a stranger's run, by name. {run} and {output} are to be filled in."""
    train = ["train", "--config-name=local_test_synthetic", *TINY, *ONE.settings, "hardware.compilation_cache=null"]
    train += [
        f"data.filespec={ROOT / 'synthetic_dataset.zarr'}",
        "paths.root_working_dir={home}",
        "training.eval_batches=0",
    ]
    train += ["training.sample_interval=null"]
    found = {
        "report": ["tools.report", "run={run}", "output={output}.html"],
        "generate": ["tools.generate", "run={run}", "prompt_ids=[1,2]", "max_tokens=2"],
        "export": ["tools.checkpoint_to_huggingface", "run={run}", "output={output}"],
        "init_from": [*train, "training.init_from={run}", "paths.model_name=fresh", "training.steps=1"],
        "resume": [*train, "paths.model_name={name}", f"training.steps={STEPS + 1}"],
    }
    if (ROOT / "tools" / "evaluate.py").exists() or (ROOT / "tools" / "evaluate").exists():
        found["evaluate"] = ["tools.evaluate", "run={run}"]
    return found


PAIRS = [(given, tool) for given in RUNS for tool in commands()] + [(given, "import") for given in MODELS]
"""What a stranger gives, and the tool that reads it."""


@functools.cache
def exported(field: Field) -> Path:
    """A model of `transformers`, made from the undisturbed run."""
    output = field.scratch / "exported"
    run_tool(field.scratch, ["tools.checkpoint_to_huggingface", f"run={unkilled(field, ONE)}", f"output={output}"])
    return output


def run_tool(home: Path, words: list[str]) -> tuple[int | None, str, str]:
    """Exit status of a tool started in `home`, its stdout and its stderr. The status is None for one that hangs."""
    env = environment(4) | {"DRILL_SECRET": SECRET}
    try:
        done = subprocess.run([sys.executable, "-m", *words], cwd=home, env=env, capture_output=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, "", ""
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def play(field: Field, case: int) -> Finding:
    """A tool reads what a stranger gives."""
    given, tool = PAIRS[selection(len(PAIRS), field.count)[case]]
    home = field.directory(f"case{case}")
    canary, evil = home / "canary", home / "runs" / "evil"
    evil.mkdir(parents=True)
    trap = (
        f"from pathlib import Path\nPath({str(canary)!r}).touch()\ndef main(*_, **__): Path({str(canary)!r}).touch()\n"
    )
    (evil / "payload.py").write_text(trap)
    directory, output = home / "runs" / "stranger", home / "output"
    shutil.copytree(exported(field) if tool == "import" else unkilled(field, ONE), directory)
    with Listener() as listener:
        given(directory, listener.url)
        if tool == "import":
            words = ["tools.huggingface_to_checkpoint", "model={run}", "output={output}"]
        else:
            words = commands()[tool]
        places = {"run": directory, "output": output, "home": directory.parent, "name": directory.name}
        fill = lambda word: re.sub(r"{(\w+)}", lambda m: str(places[m[1]]), word)
        code, out, err = run_tool(home, [fill(word) for word in words])
    wrong = []
    if canary.exists():
        wrong.append("the stranger's module was executed")
    if listener.heard:
        wrong.append(f"a server of the stranger heard {listener.heard[0]!r}")
    if SECRET in out + err:
        wrong.append("a secret of the environment was shown")
    if code is None or code < 0:
        wrong.append("the tool hangs" if code is None else f"the tool died of signal {-code}")
    if "Traceback (most recent call last)" in err:
        wrong.append(f"a traceback: {shortened(err)}")
    if found := CONTROLS.search(out + err):
        wrong.append(f"the control character {found[0]!r} was printed")
    pages = [path.read_text(errors="replace") for path in home.glob("output*") if path.is_file()]
    if any("<img src=x" in page for page in pages):
        wrong.append("markup of the stranger is in the page")
    if given in REFUSED and (output / "checkpoints").exists():
        wrong.append("the model was imported")
    outcome = "refused" if code else "read as data"
    return Finding(f"{given.__name__.replace('_', ' ')}, {tool}", tuple(wrong), outcomes=(outcome,))


KIND = Kind(
    name="files",
    short=12,
    full=len(PAIRS),
    checked="Runs and models of a stranger, read by each tool: no module of theirs is imported, no server is asked, no "
    "secret, control character or markup is shown. A tool that refuses one does so without a traceback.",
    play=play,
    cases=lambda count: min(count, len(PAIRS)),
)
