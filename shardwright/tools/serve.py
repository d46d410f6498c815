"""A page that continues texts with the newest checkpoint of a run, token by token, also while the run trains.

With JAX_PLATFORMS=cpu it leaves the devices to the run: `python -m tools.serve run=runs/<name>`.
"""

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from string import Template
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jax

from shardwright.data.checks import check_range, check_ranges, within
from shardwright.data.text.tokenizers import tokenizer_of_run
from shardwright.data.untrusted import refused
from shardwright.huggingface.sidecars import ends_of
from shardwright.modeling.model import load_model
from shardwright.run.config import Config
from shardwright.run.opening import CheckpointChoice, MeshChoice, mesh_for, open_run
from shardwright.run.step import trace_step
from shardwright.sampling.sampler import Sampler, Sampling
from shardwright.settings.program import run_program


@dataclass
class Settings(CheckpointChoice):
    """Settings of the program."""

    host: str = "localhost"
    """Address to answer at. Whoever reaches another one can use the model: there is no password."""
    port: int = within(0, 2**16, 8000)
    """0: any that is free."""
    seconds: int = within(1, 2**20, 600)
    """Longest time of a request, from its connection to the end of its text. The wait for other texts is part of it."""


FIELDS = {"temperature": (float, "1.0"), "min_p": (float, "0.05"), "max_tokens": (int, "200")}  # kinds and defaults
PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>$title</title>
<style>:root { color-scheme: light dark } body { font: 16px/1.5 system-ui; max-width: 45em; margin: auto; padding: 1em }
  textarea { width: 100%; box-sizing: border-box } textarea, pre { white-space: pre-wrap; font: inherit }</style>
<form onsubmit="let s = 0; setInterval(() => state.textContent = 'working, ' + ++s + ' s', 1000)">
<textarea name="prompt" rows="5" aria-label="prompt" autofocus>
$prompt</textarea> $fields <button>Continue</button></form>
<p>$about <span id="state" role="status"></span></p>""")


class Model:
    """The newest checkpoint of a run, or that of `config.step`, on the mesh in force. One thread at a time uses it."""

    def __init__(self, config: Settings):
        self.mesh = jax.sharding.get_mesh()
        self._lock = threading.Lock()
        self.config = config
        self.step = None
        self.metadata = None
        self.texts = 0
        self.c: Config | Any = None
        self._any: Sampler | None = None
        self.sampler = functools.lru_cache(8)(self._sampler)  # each compiles how it draws

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Context of a thread that uses the model."""
        with self._lock, jax.set_mesh(self.mesh):
            yield

    def refresh(self) -> None:
        """Reads the checkpoint if there is a newer one. Raises ValueError if it cannot be read."""
        with open_run(self.config.run, self.config.step, self.config.trust) as saved:
            if (saved.step, saved.metadata) == (self.step, self.metadata):
                return
            self.weights = self.metadata = None  # two may not fit
            if saved.config != self.c:
                self.sampler.cache_clear()  # of another run of this name
                self._any = None
            self.c = saved.config
            self.model = load_model(saved.config.model)
            self.tokenizer = tokenizer_of_run(saved.config.data, self.config.tokenizer, saved.tokenizer_file)
            self.stop = ends_of(saved, self.tokenizer)
            self.weights = saved.read_weights(self.model, self.config.other_source, print, self.config.average)
            self.step, self.metadata = saved.step, saved.metadata

    def _sampler(self, temperature: float, min_p: float) -> Sampler:
        """What draws tokens one by one, with memory for all that the model sees."""
        context = self.c.training.seq_len
        settings = Sampling(context, temperature, min_p=min_p, stop=self.stop)
        if self._any is not None:
            return self._any.with_settings(settings)
        self._any = Sampler(trace_step(self.c, self.model), settings, context, 1, chunk=1)
        return self._any

    def compile(self) -> None:
        """Compiles what the settings on the page need, for prompts of any length."""
        defaults = {name: kind(text) for name, (kind, text) in FIELDS.items() if name != "max_tokens"}
        self.sampler(**defaults).compile(self.weights)

    def stream(self, sampler: Sampler, ids: list[int], asked: Sampling, write: Callable[[str], Any]) -> str:
        """Calls `write` with the text that each token adds. Part of a character waits for the rest.

        Returns how many tokens there are, and why there are no more.
        """
        done = ""

        def is_over(prompt: list[int], added: list[int], whole: bool = False) -> bool:
            nonlocal done
            text = self.tokenizer.continuation(prompt, added[:-1] if added[-1] in self.stop else added)
            text = text if whole else text.rstrip("\N{REPLACEMENT CHARACTER}")
            write(text[len(done) :])
            done = max(done, text, key=len)
            return len(added) >= asked.max_tokens

        self.texts += 1
        added = sampler.generate(self.weights, [ids], is_over, first=self.texts - 1)[0]
        is_over(ids, added, whole=True)
        full = f"with the prompt they fill the model's context of {sampler.context}"
        why = "max_tokens is reached" if len(added) >= asked.max_tokens else full
        return f"{len(added)} tokens: {'the text ends here' if added[-1] in self.stop else why}."


class Handler(BaseHTTPRequestHandler):
    """Answers a request with the page and, where it has a prompt, the text."""

    model: Model
    timeout = 60  # for a client that sends nothing

    def handle(self) -> None:
        """Answers. A client that sends or reads too slowly is cut off: what waits for it fails."""

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        end = threading.Timer(self.model.config.seconds, hang_up)
        end.daemon = True
        end.start()
        super().handle()
        end.cancel()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        asked = {name: value.replace("\r\n", "\n") for name, value in parse_qsl(query, keep_blank_values=True)}
        with self.model.hold() if "prompt" in asked else contextlib.nullcontext():
            self._answer(path, asked)

    def _answer(self, path: str, asked: dict[str, str]) -> None:
        context = self.model.c.training.seq_len
        values = {name: asked.get(name) or default for name, (_, default) in FIELDS.items()}
        if not asked.get("max_tokens"):
            values["max_tokens"] = str(min(int(values["max_tokens"]), context))
        try:
            if path != "/":
                raise ValueError(f"there is no page {path}, only /.")
            host = urlsplit(f"//{self.headers['Host']}").hostname
            local = ("localhost", "127.0.0.1")
            is_own = host in local or self.model.config.host not in local  # any other name leads here by a trick
            if not is_own or self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
                raise ValueError("a page of another site asks. Open this one by its address.")
            for name, (kind, _) in FIELDS.items():
                text = values[name].replace(".", "", kind is float)
                if not (text.isascii() and text.isdecimal()):
                    raise ValueError(f"{name} is {values[name]!r}; it must be a number, at least 0.")
            sampling = Sampling(**{name: kind(values[name]) for name, (kind, _) in FIELDS.items()})
            check_ranges("", sampling)
            check_range("max_tokens", sampling.max_tokens, 1, context + 1)
            ids = None
            if "prompt" in asked:
                self.model.refresh()
                ids = self.model.tokenizer.ids(asked["prompt"])
                sampler = self.model.sampler(temperature=sampling.temperature, min_p=sampling.min_p)
                sampler.check([ids])
            status = 200
            about = f"step {self.model.step}"
        except (ValueError, OSError) as error:
            ids = None
            status = 400
            about = f"Error: {error}"
        run = self.model.config.run
        prompt = escape(asked.get("prompt", ""))
        fields = (f'<label>{n} <input name="{n}" value="{escape(v)}" size="6"></label>' for n, v in values.items())
        parts = {"title": escape(run), "prompt": prompt, "fields": " ".join(fields), "about": escape(f"{run}: {about}")}
        with contextlib.suppress(ConnectionError, TimeoutError):  # a reader who has left, or does not read
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self._write(PAGE.substitute(parts))
            if ids is not None:
                self._write(f"<pre><b>{prompt}</b>")
                end = self.model.stream(sampler, ids, sampling, lambda text: self._write(escape(text)))
                self._write(f"</pre><p>{escape(end)}</p>")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode(errors="replace"))


def serve(config: Settings) -> None:
    """Answers until it is interrupted. Raises ValueError if there is no checkpoint, or its tokenizer is missing."""
    with open_run(config.run, config.step, config.trust) as saved:
        mesh = mesh_for(MeshChoice(), saved.config)
    with refused(f"host={config.host} port={config.port} cannot be used", "Give another port."):
        server = ThreadingHTTPServer((config.host, config.port), Handler)
    with jax.set_mesh(mesh), server:
        Handler.model = Model(config)
        Handler.model.refresh()
        print("compiling for prompts of any length", flush=True)
        Handler.model.compile()
        print(f"http://{config.host}:{server.server_port}/ continues texts with {config.run}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    run_program("serve", Settings, serve)
