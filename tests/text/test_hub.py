"""What is asked of the Hugging Face hub, and what of a hub that does not answer."""

import http.server
import os
import socket
import threading
import time

import pytest

from shardwright.data import hub


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(hub, "_SILENT", [])


def test_one_that_does_not_answer_is_given_up(online, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:  # which accepts, and says nothing
        monkeypatch.setenv("HF_ENDPOINT", url := f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "ANSWERS_S", 0.2)
        began = time.monotonic()
        hub.check_hub()
        hub.check_hub()  # which asks no more
        with (
            pytest.raises(
                ValueError, match=f"^no model: {url} does not answer, and it was not downloaded before. Check"
            ),
            hub.reading_hub("no model", "Check the name."),
        ):
            raise OSError("set HF_HUB_OFFLINE=0")
    assert time.monotonic() - began < 5
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    said = capsys.readouterr().err
    assert said.startswith(f"{url} does not answer (")
    assert said.count("\n") == 1


class Refuses(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(403)

    def log_message(self, *_):
        pass


def test_one_that_refuses_is_read_from(online, monkeypatch, capsys):
    """Its libraries say what they may not read."""
    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        hub.check_hub()
        thread.join()
    assert not os.environ["HF_HUB_OFFLINE"]
    assert capsys.readouterr().err == ""
