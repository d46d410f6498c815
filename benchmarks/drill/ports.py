"""Strangers at the ports of a run of two processes: the run ends as if nobody had come."""

import contextlib
import os
import random
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

from benchmarks.drill.cases import Field, Finding, Kind
from benchmarks.drill.runs import LIMIT_S, TWO, Start, cache_of, differences, unkilled

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client of gRPC says first."""
OPEN_AT_MOST = 700
"""Connections that are open at a time, below the limit on open files."""


def listening(process: subprocess.Popen) -> set[tuple[str, int]]:
    """Address and port of each TCP socket on which the process listens, from Linux's /proc."""
    root, inodes, found = Path(f"/proc/{process.pid}"), set(), set()
    with contextlib.suppress(OSError):
        for link in (root / "fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
        for table in ("tcp", "tcp6"):
            for line in (root / "net" / table).read_text().splitlines()[1:]:
                local, state, inode = (line.split()[i] for i in (1, 3, 9))
                if state == "0A" and inode in inodes:
                    address, _, port = local.partition(":")
                    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                    found.add((str(ip_address(b"".join(words))), int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    """Whether only this host reaches the address."""
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


# ---- what strangers do ---------------------------------------------------------------------------------------------


def idle(stranger: socket.socket, draw: random.Random) -> None:
    """Says nothing."""


def garbage(stranger: socket.socket, draw: random.Random) -> None:
    """Sends random bytes."""
    stranger.sendall(draw.randbytes(draw.choice([1, 100, 50_000])))


def http(stranger: socket.socket, draw: random.Random) -> None:
    """Asks for a page."""
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n")


def half_open(stranger: socket.socket, draw: random.Random) -> None:
    """Begins as a client of gRPC does, and sends no more."""
    stranger.sendall(PREFACE[: draw.randrange(1, len(PREFACE))])
    stranger.shutdown(socket.SHUT_WR)


def long_frames(stranger: socket.socket, draw: random.Random) -> None:
    """Announces the longest frames of HTTP/2, and sends random ones."""
    stranger.sendall(PREFACE + b"\xff\xff\xff" + draw.randbytes(6) + draw.randbytes(20_000))


def long_message(stranger: socket.socket, draw: random.Random) -> None:
    """Announces a message of 2**62 bytes, as a partner of a collective could."""
    stranger.sendall(struct.pack("<QQ", 2**62, 2**62) * 16)


def reset(stranger: socket.socket, draw: random.Random) -> None:
    """Breaks the connection off."""
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


STRANGERS: tuple[Callable[[socket.socket, random.Random], None], ...] = (
    idle,
    garbage,
    http,
    half_open,
    long_frames,
    long_message,
    reset,
)


class Crowd:
    """Strangers who keep coming to every port on which a run listens, until the context ends.

    Attributes:
        came: number of connections that were made.
        seen: address and port of all that listened.
    """

    def __init__(self, start: Start, behave: Callable[[socket.socket, random.Random], None], draw: random.Random):
        self.came, self.seen = 0, set()
        self._start, self._behave, self._draw = start, behave, draw
        self._open: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come, daemon=True)

    def __enter__(self) -> "Crowd":
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._over.set()
        self._thread.join()
        for stranger in self._open:
            stranger.close()

    def _come(self) -> None:
        while not self._over.wait(0.2):
            self.seen |= set().union(*map(listening, self._start.processes))
            for address, port in sorted(self.seen):
                for _ in range(40):
                    self._visit("::1" if address == "::1" else "127.0.0.1", port)

    def _visit(self, address: str, port: int) -> None:
        with contextlib.suppress(OSError):
            stranger = socket.create_connection((address, port), timeout=1)
            self.came += 1
            self._open.append(stranger)
            self._behave(stranger, self._draw)
        while len(self._open) > OPEN_AT_MOST:
            self._open.pop(0).close()


def play(field: Field, case: int) -> Finding:
    """A run of two processes with one kind of stranger."""
    behave = STRANGERS[case % len(STRANGERS)]
    expected, directory = unkilled(field, TWO), field.scratch / f"case{case}"
    with Start(directory, TWO, cache=cache_of(field)) as start, Crowd(start, behave, field.random(case)) as crowd:
        codes = start.wait(LIMIT_S)
        endings = [start.ending(i) for i in range(2)]
    wrong = [f"process {i} ended with {code}: {endings[i]}" for i, code in enumerate(codes) if code != 0]
    wrong += [] if any(codes) else differences(directory, expected)
    if open_to_all := sorted(address for address, _ in crowd.seen if not is_loopback(address)):
        wrong.append(f"{len(open_to_all)} ports are open to other hosts, at {', '.join(sorted(set(open_to_all)))}")
    if not crowd.came:
        wrong.append("no port was found")
    return Finding(behave.__name__.replace("_", " "), tuple(wrong), crowd.came)


KIND = Kind(
    name="ports",
    short=len(STRANGERS),
    full=len(STRANGERS),
    checked="Two processes, and strangers at each of their ports, hundreds at a time: idle, with garbage, with HTTP, "
    "half open. Both processes end normally, with results equal to the bit. On one host they listen on loopback alone.",
    play=play,
    missing=lambda: None if Path("/proc/self/net/tcp").exists() else "it needs Linux's /proc",
)
