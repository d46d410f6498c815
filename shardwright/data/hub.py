"""Reads from the Hugging Face hub only if it answers."""

import contextlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

from shardwright.data.untrusted import refused

ANSWERS_S = 5.0
"""Seconds within which the hub answers."""
_SILENT: list[str] = []
"""Addresses of hubs that did not answer."""


def check_hub() -> None:
    """Has Hugging Face's libraries read only what they downloaded before, if the hub does not answer; prints a line.

    They would retry for minutes. They read HF_HUB_OFFLINE when they are imported, so call this before.
    """
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=ANSWERS_S).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        _SILENT.append(endpoint)
        why = getattr(error, "reason", error)
        print(f"{endpoint} does not answer ({why}): only what was downloaded before is read.", file=sys.stderr)


@contextlib.contextmanager
def reading_hub(what: str, remedy: str) -> Iterator[None]:
    """Context in which Hugging Face's libraries, imported in it, read from the hub: `refused`, after check_hub.

    Of a hub that does not answer it says so, because these libraries advise to unset what check_hub has set.
    """
    check_hub()
    with refused(what, remedy):
        try:
            yield
        except OSError as error:
            if not _SILENT:
                raise
            raise ValueError(f"{_SILENT[0]} does not answer, and it was not downloaded before") from error.__cause__
