"""The page over HTTP: texts are those of tools.generate, piece by piece; a newer checkpoint is read; bad input."""

import contextlib
import dataclasses
import http.client
import io
import os
import re
import socket
import subprocess
import sys
import threading
import time
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode, urlsplit

import jax
import pytest
from rich.console import Console

import train
from shardwright.data.loader import DataConfig, StreamConfig
from shardwright.modeling.model import load_model
from shardwright.tools import serve
from shardwright.tools.generate import Settings, generate
from tests.support import tiny
from tests.support.local_server import LocalServer, SilentHandler

ROOT = Path(__file__).parents[2]
TEXT = "It is a truth universally acknowledged, that a <b>naïve</b> man in possession of a fortune, must be in want"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of steps 3 and 5."""
    directory = tmp_path_factory.mktemp("runs")
    c = tiny.config(tiny.model(vocab=320, layers=1), eval_batches=0)
    (directory / "text.txt").write_text((TEXT + "\n") * 30)
    files = [str(directory / "text.txt")]
    c.data = DataConfig(stream=StreamConfig(train_files=files, end_token="</s>"))
    c.training = dataclasses.replace(c.training, steps=5, checkpoint_interval=3, seq_len=64)
    with jax.set_mesh(tiny.mesh("d=8")):
        train.train(c, load_model(c.model), directory)
    return directory


def get(url, headers=None, **asked):
    """The status, and the pieces in which the page comes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("GET", f"/?{urlencode(asked)}" if "path" not in asked else asked["path"], headers=headers or {})
    response = connection.getresponse()
    return response.status, [piece.decode() for piece in iter(lambda: response.read1(), b"")]


@pytest.mark.long
def test_a_page_over_http(run):
    newest, aside = run / "checkpoints/0000000005", run / "aside"
    newest.rename(aside)
    prompt, numbers = 'It is "<i>&amp;', {"temperature": 0, "min_p": 0, "max_tokens": 24}
    command = [sys.executable, "-m", "tools.serve", f"run={run}", "port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = next(line for line in process.stdout if line.startswith("http://localhost:")).split()[0]
            status, page = get(url)
            assert status == 200
            assert "step 3" in "".join(page)
            assert "<pre>" not in "".join(page)
            for step in (3, 5):
                if step == 5:
                    os.rename(aside, newest)
                status, page = get(url, prompt=prompt, **numbers)
                config = Settings(str(run), prompt=prompt, temperature=0, max_tokens=24, step=step)
                (expected,) = generate(config, Console(file=io.StringIO()))
                found = re.search(r"<pre><b>(.*?)</b>(.*)</pre>", "".join(page), re.DOTALL)
                assert status == 200
                assert f"step {step}" in "".join(page)
                assert (unescape(found[1]), unescape(found[2])) == (prompt, expected["text"])
                assert "<i>" not in "".join(page)
                assert len(page) > 8  # not all at the end
                assert "".join(page).endswith("</pre><p>24 tokens: max_tokens is reached.</p>")
            assert "".join(get(url, prompt="a" * 50, max_tokens=64)[1]).endswith(
                "<p>14 tokens: with the prompt they fill the model&#x27;s context of 64.</p>"
            )
            first, second = ("".join(get(url, prompt="a", max_tokens=9)[1]) for _ in range(2))
            assert first != second  # of other noise
            for asked, line in [
                ({"max_tokens": "<x>"}, "max_tokens is &#x27;&lt;x&gt;&#x27;; it must be a number"),
                ({"max_tokens": "16000000"}, "max_tokens is 16000000; it must be at least 1 and below 65"),
                ({"max_tokens": "９"}, "max_tokens is &#x27;９&#x27;; it must be a number"),
                ({"max_tokens": "0"}, "max_tokens is 0; it must be at least 1"),
                ({"min_p": "1.5"}, "min_p is 1.5; it must be at least 0 and at most 1"),
                ({"temperature": "nan"}, "temperature is &#x27;nan&#x27;; it must be a number"),
                ({"prompt": "x" * 999}, "prompt 0 has 999 tokens; it must have fewer than"),
                ({"path": "/etc"}, "there is no page /etc, only /."),
                ({"headers": {"Host": "evil.example:8000"}}, "a page of another site asks"),
                ({"headers": {"Sec-Fetch-Site": "cross-site"}}, "a page of another site asks"),
            ]:
                status, page = get(url, **{"prompt": "a"} | asked)
                assert status == 400
                assert f"Error: {line}" in "".join(page)
                assert "<pre>" not in "".join(page)
        finally:
            process.terminate()


@pytest.mark.long
def test_no_prompt_is_compiled_for(run):
    """Another temperature compiles only how tokens are drawn."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    with jax.set_mesh(tiny.mesh("d=1")):
        model = serve.Model(serve.Settings(run=str(run)))
        model.refresh()
        model.compile()
        assert compiled
        for temperature, count in {1.0: 0, 0.5: 1}.items():
            compiled.clear()
            sampler = model.sampler(temperature=temperature, min_p=0.05)
            for length in (1, 20, 63):
                model.stream(sampler, [5] * length, serve.Sampling(max_tokens=3), lambda text: None)
            assert len(compiled) == count


class Model:
    """As tools.serve has it; of a text that begins with s, it writes all that a reader could take."""

    def __init__(self, seconds):
        self.config, self.step = serve.Settings(run="a run", seconds=seconds), 3
        self.c = SimpleNamespace(training=SimpleNamespace(seq_len=64))
        self.tokenizer, self.lock = SimpleNamespace(ids=list), threading.Lock()
        self.refresh, self.sampler = (lambda: None), (lambda **settings: SimpleNamespace(check=lambda prompts: None))

    def hold(self):
        return self.lock

    def stream(self, sampler, ids, asked, write):
        for _ in range(2**14 if ids[:1] == ["s"] else 1):
            write("text " * 2**10)
        return "1024 tokens: max_tokens is reached."


@pytest.fixture
def server():
    class Handler(serve.Handler):
        model = Model(seconds=3)
        log_message = SilentHandler.log_message

    with LocalServer(Handler) as server:
        yield server


def connected(server, text):
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
    connection.sendall(text)
    return connection


def test_others_are_answered_while_a_client_says_nothing(server):
    with connected(server, b""), connected(server, b"GET / HTTP/1.1\r\nHost: loc"):
        begin = time.monotonic()
        for asked in ({}, {"prompt": "a"}):
            assert get(server.url, **asked)[0] == 200
        assert time.monotonic() - begin < 2


@pytest.mark.long
def test_a_slow_client_ends(server):
    """One that sends a letter now and then, and one that does not read, which the next text waits for."""
    begin = time.monotonic()
    with connected(server, b"GET /?prompt=slow HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with (
            connected(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ") as slow,
            contextlib.suppress(ConnectionError),
        ):
            while time.monotonic() < begin + 15:
                slow.sendall(b"x")
                time.sleep(0.2)
        assert "text" in "".join(get(server.url, prompt="a")[1])
    assert time.monotonic() - begin < 15
