"""A server of `s3://` for tests: objects in memory, and requests as tensorstore makes them."""

import re
import threading
import urllib.parse
from xml.sax.saxutils import escape

import pytest

from tests.support.local_server import LocalServer, SilentHandler

PAGE = 100
"""Keys in one answer to a list, so that tests see lists of several answers."""


class S3Server(LocalServer):
    """Objects by their path `/bucket/key`. A context manager.

    Attributes:
        objects: contents by path.
    """

    # If the queue is full, a connection is tried again after a second.
    request_queue_size = 4096

    def __init__(self):
        super().__init__(_Handler)
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()


@pytest.fixture
def server(monkeypatch):
    """A server of the objects of s3:// URLs."""
    with S3Server() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield found


class _Handler(SilentHandler):
    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "ETag": '"1"', **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_any(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(parts.path), dict(urllib.parse.parse_qsl(parts.query))
        objects = self.server.objects
        with self.server.lock:
            self.server.requests.append((self.command, path))
            if self.command == "PUT":
                objects[path] = content
                return self.answer(200)
            if self.command == "DELETE":
                objects.pop(path, None)
                return self.answer(204)
            if "list-type" in query:
                return self.list(path, query)
            if path not in objects:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            found = objects[path]
            if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
                start = int(asked[1]) if asked[1] else max(0, len(found) - int(asked[2]))
                end = min(int(asked[2]) + 1, len(found)) if asked[1] and asked[2] else len(found)
                if start >= len(found):
                    return self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                where = {"Content-Range": f"bytes {start}-{end - 1}/{len(found)}"}
                return self.answer(206, found[start:end], **where)
            return self.answer(200, found[:])

    def list(self, path: str, query: dict[str, str]) -> None:
        prefix, after = path + query.get("prefix", ""), path + query.get("continuation-token", "")
        found = sorted(key for key in self.server.objects if key.startswith(prefix) and key > after)
        page, more = found[:PAGE], len(found) > PAGE

        def key(name):
            return f"<Contents><Key>{escape(name[len(path) :])}</Key><Size>1</Size></Contents>"

        body = f"<IsTruncated>{str(more).lower()}</IsTruncated>" + "".join(map(key, page))
        if more:
            last = escape(page[-1][len(path) :])
            body += f"<NextContinuationToken>{last}</NextContinuationToken>"
        text = f'<?xml version="1.0"?><ListBucketResult>{body}<KeyCount>{len(page)}</KeyCount></ListBucketResult>'
        self.answer(200, text.encode(), **{"Content-Type": "application/xml"})

    do_GET = do_PUT = do_HEAD = do_DELETE = handle_any
