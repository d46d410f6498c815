"""Several processes as one run: when one of them dies, fails or stalls, the others end and say which one it was.

JAX ends the others when a process stops sending heartbeats. It does not say on which host it was, nor at which step. A
process that lives but never comes to its next step it leaves alone, with the others waiting for its collective.
"""

import atexit
import contextlib
import faulthandler
import json
import math
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cluster.progress import Limits, Peer, Place, culprits, mark, place, restart

EXIT_CODE = 75
"""Of a process that ended because of another one: EX_TEMPFAIL of sysexits.h, "try again"."""
_FAREWELL_S = 5.0
"""For how long process 0 waits for the others to end before it."""
_HELLO_S = 5.0
"""For an answer to the first message on a connection."""
_LINE_BYTES = 1 << 16
"""More than any message has."""


class Watch:
    """While entered, ends this process when another one of the run dies, fails or stalls, with a message that names it.

    Process 0 listens on a free port, to which all others keep a connection; they send it where they are, it decides,
    and each writes the message to its stderr and ends with EXIT_CODE, without waiting for devices or threads. A process
    that itself failed ends with its own exception. Leaving waits for the others to leave too. With one process all of
    this does nothing.

    Args:
        settings: the run's DistributedConfig.

    Raises:
        ValueError: another number of processes found one another.
        OSError: not all processes connected in time.
    """

    def __init__(self, settings: Any):
        self._limits = Limits(settings.heartbeat_timeout, settings.stall_timeout, settings.pause_timeout)
        self._join_s, self._count, self._coordinator = settings.join_timeout, settings.count, settings.coordinator
        self._id, self._host = 0, socket.gethostname()
        self._interval = min(max(self._limits.heartbeat / 30, 0.1), 2.0)
        self._connected, self._over = threading.Event(), threading.Event()
        self._report: dict[str, Any] = {}
        self._wake = socket.socketpair()
        self._is_urgent = self._cut_off = False

    def __enter__(self) -> "Watch":
        restart()
        if jax.process_count() == 1:
            self._check_count()
            return self
        self._id = jax.process_index()
        server = _listen() if self._id == 0 else None
        self._meeting = _agree(server, self._host, self._coordinator)
        self._hub = Peer(0, self._meeting["host"], time.monotonic(), time.monotonic())
        connection = server or self._connect()
        threading.Thread(target=self._run, args=(connection,), name="watch", daemon=True).start()
        if not self._connected.wait(self._join_s):
            raise OSError(
                f"process {self._id} on {self._host}: after {self._join_s:g} s (distributed.join_timeout) "
                f"{self._missing() if server else 'process 0 still waits for other processes'}."
            )
        try:
            self._check_count()
        except ValueError:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if jax.process_count() == 1:
            return
        if kind is None:
            mark("finished", paused=True)
            self._report = {"done": True}
        else:
            text = f"{kind.__name__}: {error}".strip().splitlines()[0]
            self._report = {"failed": text[:1000], "by_runtime": issubclass(kind, jax.errors.JaxRuntimeError)}
        self._wake[1].send(b".")
        self._over.wait()
        if self._cut_off:
            # The exception is shown as ever, and then the process ends: JAX would wait for the others, which are gone.
            atexit.register(_end_now, 1)

    def _check_count(self) -> None:
        if self._count is not None and jax.process_count() != self._count:
            raise ValueError(
                f"distributed.count is {self._count}, but {jax.process_count()} processes found one another. Start one "
                "process for each, e.g. with srun, or set distributed.count."
            )

    def _run(self, connection: "socket.socket | _Link") -> None:
        try:
            if self._id == 0:
                self._decide(connection)
            else:
                self._follow(connection)
        except BaseException:
            # Nobody would watch any more, and the main thread wait for it in the end.
            traceback.print_exc()
            os._exit(1)

    # ---- process 0

    def _decide(self, server: socket.socket) -> None:
        now = time.monotonic()
        self._peers = {i: Peer(i, "an unknown host", now, now) for i in range(jax.process_count())}
        self._peers[0].host = self._host
        self._links: dict[int, _Link] = {}
        with selectors.DefaultSelector() as ready:
            ready.register(server, selectors.EVENT_READ)
            ready.register(self._wake[0], selectors.EVENT_READ)
            woken = decided = now
            while True:
                for key, _ in ready.select(self._interval):
                    if key.fileobj is server:
                        with contextlib.suppress(BlockingIOError, ConnectionError):
                            link = _Link(server.accept()[0])
                            ready.register(link.socket, selectors.EVENT_READ, link)
                    elif key.fileobj is self._wake[0]:
                        self._wake[0].recv(16)
                        self._is_urgent = True
                    elif not self._hear(key.data):
                        ready.unregister(key.data.socket)
                        key.data.socket.close()
                now = time.monotonic()
                if self._was_stopped(woken, now):
                    for peer in self._peers.values():
                        peer.heard = now
                woken = now
                if now - decided < self._interval and not self._is_urgent:
                    continue
                decided, self._is_urgent = now, False
                self._note(self._peers[0], {"place": place(), **self._report})
                self._tell({"place": place()})
                if not self._connected.is_set():
                    if len(self._links) == len(self._peers) - 1:
                        self._tell({"welcome": True})
                        self._connected.set()
                    continue
                found = culprits(list(self._peers.values()), now, self._limits)
                if found:
                    self._tell({"end": found[1], "ids": found[0]})
                    self._wait_for_ends(ready)
                    server.close()
                    self._end(*found)
                    return
                peers = self._peers.values()
                if all(peer.done for peer in peers) or all(peer.failed is not None for peer in peers):
                    self._tell({"over": True})
                    self._wait_for_ends(ready)
                    server.close()
                    self._over.set()
                    return

    def _hear(self, link: "_Link") -> bool:
        """Takes what came on a connection; False if it is closed, or of a stranger."""
        messages, is_open = link.receive()
        for message in messages:
            if link.peer is None:
                if message.get("token") != self._meeting["token"] or message.get("id") not in self._peers:
                    return False
                link.peer = self._peers[message["id"]]
                link.peer.host, link.peer.lost = message["host"], False
                self._links[link.peer.id] = link
                link.send({"hello": True})
                self._is_urgent = True
            self._note(link.peer, message)
        # A process that got no answer in time may have connected again.
        if not is_open and link.peer is not None and self._links[link.peer.id] is link:
            link.peer.lost = self._is_urgent = True
        return is_open

    def _note(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.heard = time.monotonic()
        if "place" in message:
            before, peer.place = peer.place, Place(*message["place"])
            if peer.place.marks != before.marks:
                peer.moved = peer.heard
        if message.get("done") and not peer.done:
            peer.done = self._is_urgent = True
        if message.get("failed") is not None and peer.failed is None:
            peer.failed, peer.failed_at, peer.by_runtime = message["failed"], peer.heard, message["by_runtime"]
            self._is_urgent = True

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            link.send(message)

    def _wait_for_ends(self, ready: selectors.BaseSelector) -> None:
        """Until the others have closed their connections: the end of process 0, which JAX's client in each notices at
        once, would overtake the message."""
        deadline = time.monotonic() + _FAREWELL_S
        silent = {i for i, peer in self._peers.items() if time.monotonic() - peer.heard > self._limits.heartbeat / 2}
        peers = {link.socket: link.peer for link in self._links.values()}
        left = {s for s, peer in peers.items() if not (peer.lost or peer.failed is not None or peer.id in silent)}
        while left and time.monotonic() < deadline:
            for key, _ in ready.select(0.1):
                if key.data is not None and not key.data.receive()[1]:
                    ready.unregister(key.fileobj)
                    left.discard(key.fileobj)
                elif key.fileobj is self._wake[0]:
                    self._wake[0].recv(16)

    def _missing(self) -> str:
        missing = [str(i) for i in range(1, jax.process_count()) if i not in self._links]
        return f"process {', '.join(missing)} has not connected to port {self._meeting['port']}"

    # ---- the others

    def _connect(self) -> "_Link":
        """The connection to process 0. Raises OSError if none of its addresses answers."""
        deadline = time.monotonic() + self._join_s
        problems = {}
        while time.monotonic() < deadline:
            for address in self._meeting["addresses"]:
                try:
                    link = _Link(socket.create_connection((address, self._meeting["port"]), timeout=_HELLO_S))
                    link.send({"token": self._meeting["token"], "id": self._id, "host": self._host})
                    if link.receive_one(_HELLO_S).get("hello"):
                        return link
                    problems[address] = "another program answers"
                except OSError as error:
                    problems[address] = str(error)
            time.sleep(1)
        raise OSError(
            f"process {self._id} on {self._host} cannot connect to process 0 on {self._meeting['host']}, port "
            f"{self._meeting['port']}, within {self._join_s:g} s (distributed.join_timeout): "
            + "; ".join(f"{address}: {problem}" for address, problem in problems.items())
            + ". Hosts of a run must reach one another on all ports, as their collectives do."
        )

    def _follow(self, link: "_Link") -> None:
        hub, last = self._hub, time.monotonic()
        hub.heard = last
        with selectors.DefaultSelector() as ready:
            ready.register(link.socket, selectors.EVENT_READ)
            ready.register(self._wake[0], selectors.EVENT_READ)
            while True:
                if any(key.fileobj is self._wake[0] for key, _ in ready.select(self._interval)):
                    self._wake[0].recv(16)
                messages, is_open = link.receive()
                now = time.monotonic()
                if messages or self._was_stopped(last, now):
                    hub.heard = now
                last = now
                for message in messages:
                    if "place" in message:
                        hub.place = Place(*message["place"])
                    if "welcome" in message:
                        self._connected.set()
                    if "over" in message:
                        self._over.set()
                        link.socket.close()
                        return
                    if "end" in message:
                        self._end(message["ids"], message["end"])
                        return
                hub.lost = not is_open
                found = culprits([hub], now, self._limits._replace(stall=math.inf, pause=math.inf))
                if found:
                    self._end(*found)
                    return
                link.send({"place": place(), **self._report})

    def _was_stopped(self, before: float, now: float) -> bool:
        """Whether this process itself did not run for a while, which looks like the others' silence."""
        return now - before > max(self._limits.heartbeat / 2, 5 * self._interval)

    # ---- the end

    def _end(self, ids: Sequence[int], text: str) -> None:
        if self._report.get("failed") is not None and (self._id in ids or not self._report["by_runtime"]):
            self._cut_off = True  # its own exception says more
            self._over.set()
            return
        try:
            # At once: when process 0 has died, JAX's client is about to abort this process.
            show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
            message = (
                f"\n{show_cursor}shardwright: {text}\nprocess {self._id} on {self._host} ends too ({place()}). Start "
                "all processes again with the same command: the run goes on from its last checkpoint.\n"
            )
            os.write(2, message.encode())
            if self._id in ids:
                faulthandler.dump_traceback(file=2, all_threads=True)
            # In a thread, since the main thread may hold the lock of stdout, and hang.
            flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
            flushing.start()
            flushing.join(1)
        finally:
            os._exit(EXIT_CODE)


def _end_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Link:
    """A connection that carries JSON objects, one a line. The peer at its other end is known once it said hello."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer: Peer | None = None
        self._received = b""
        self._unread: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        """A connection that is closed or full is noticed by what does not come from it."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """What has come, and whether the connection is still open."""
        is_open = True
        try:
            while data := self.socket.recv(_LINE_BYTES):
                self._received += data
            is_open = False
        except BlockingIOError:
            pass
        except OSError:
            is_open = False
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], False  # a stranger
        is_open = is_open and len(self._received) < _LINE_BYTES and all(isinstance(m, dict) for m in messages)
        messages, self._unread = [*self._unread, *(m for m in messages if isinstance(m, dict))], []
        return messages, is_open

    def receive_one(self, timeout_s: float) -> dict[str, Any]:
        """The first message, which comes within `timeout_s` seconds, or raises OSError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            messages, is_open = self.receive()
            if messages:
                first, *self._unread = messages
                return first
            if not is_open:
                raise OSError("the connection was closed")
            time.sleep(0.01)
        raise OSError("no answer")


# ---- how the others find process 0 -----------------------------------------------------------------------------


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    else:
        server = socket.create_server(("", 0), backlog=4096)
    server.setblocking(False)
    return server


def _agree(server: socket.socket | None, host: str, coordinator: str | None) -> dict[str, Any]:
    """Where process 0 listens, and the secret word that keeps strangers out: its own choice, told to all others."""
    text = np.zeros(2048, np.uint8)
    if server is not None:
        meeting = {"host": host[:200], "port": server.getsockname()[1], "token": secrets.token_hex(16)}
        meeting["addresses"] = _own_addresses(coordinator)[:16]
        encoded = np.frombuffer(json.dumps(meeting).encode(), np.uint8)
        text[: encoded.size] = encoded
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).rstrip(b"\0"))


def _own_addresses(coordinator: str | None) -> list[str]:
    """Addresses of this host, the likeliest to be reached first."""
    found = [coordinator.rpartition(":")[0].strip("[]")] if coordinator else []
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Addresses reserved for documentation: nothing is sent, the system only chooses a route and its interface.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += sorted({str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)})
    return list(dict.fromkeys([*found, "127.0.0.1"]))
