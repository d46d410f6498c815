"""An HTTP server of a directory that answers each request after a delay: `slow_http_store.py
<directory> <seconds>`.

It prints its port. It supports GET and HEAD with ranges, as far as stores use them. A delay does
not block others.
"""

import os
import re
import sys
import time

from tests.support.local_server import LocalServer, SilentHandler


class Handler(SilentHandler):
    def do_GET(self) -> None:
        directory, seconds = sys.argv[1:]
        time.sleep(float(seconds))
        path = f"{directory}/{self.path.partition('?')[0]}"
        if not os.path.isfile(path):
            self.send_response(404)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        size = os.path.getsize(path)
        first, last = re.fullmatch(
            r"(?:bytes=(\d*)-(\d*))?", self.headers.get("Range", "")
        ).groups()
        start = int(first) if first else size - int(last) if last else 0
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if first or last else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{size}"')
        if first or last:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        if self.command == "GET":
            with open(path, "rb") as file:
                file.seek(start)
                self.wfile.write(file.read(stop - start))

    do_HEAD = do_GET


if __name__ == "__main__":
    # If the queue is full, a connection is tried again after a second, which is not the delay to be
    # measured.
    LocalServer.request_queue_size = 4096
    server = LocalServer(Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
