"""What the HTTP servers of tests have in common: a free port of this machine, a thread, and no
words about requests.
"""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class LocalServer(ThreadingHTTPServer):
    """A server on this machine. A context manager.

    Attributes:
        requests: method and path of each request, which the handler fills.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.requests: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        self.shutdown()
        self.server_close()


class SilentHandler(BaseHTTPRequestHandler):
    """Answers by HTTP/1.1, and prints nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass
