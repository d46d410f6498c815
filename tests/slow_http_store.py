"""An HTTP server of a directory that answers each request after a delay: `slow_http_store.py <directory> <seconds>`.

It prints its port. It supports GET and HEAD with ranges, as far as stores use them. A delay does not block others.
"""

import asyncio
import os
import sys


def answer(directory: str, head: bytes) -> bytes:
    """Returns the response to the head of a request."""
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    path = os.path.normpath(os.path.join(directory, target.split("?")[0].lstrip("/")))
    if not path.startswith(os.path.normpath(directory) + os.sep) or not os.path.isfile(path):
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    size = os.path.getsize(path)
    start, stop, status = 0, size, "200 OK"
    if wanted := headers.get("range"):
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = (int(first), int(last) + 1 if last else size) if first else (size - int(last), size)
        start, stop, status = max(0, start), min(stop, size), "206 Partial Content"
    fields = [f"HTTP/1.1 {status}", f"Content-Length: {stop - start}", "Accept-Ranges: bytes", f'ETag: "{size}"']
    if status.startswith("206"):
        fields.append(f"Content-Range: bytes {start}-{stop - 1}/{size}")
    body = b""
    if method == "GET":
        with open(path, "rb") as file:
            file.seek(start)
            body = file.read(stop - start)
    return "\r\n".join([*fields, "", ""]).encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, directory: str, latency: float):
        self._directory, self._latency, self._received = directory, latency, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            asyncio.get_running_loop().call_later(self._latency, self._send, head)

    def _send(self, head: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer(self._directory, head))


async def serve(directory: str, latency: float) -> None:
    """Serves the directory until the process ends."""
    # If the queue is full, a connection is tried again after a second, which is not the delay to be measured.
    make = lambda: _Connection(directory, latency)
    server = await asyncio.get_running_loop().create_server(make, "localhost", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2])))
