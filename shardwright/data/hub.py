"""Reads from the Hugging Face hub only if it answers."""

import os
import sys
import urllib.error
import urllib.request

ANSWERS_S = 5.0
"""Seconds within which the hub answers."""


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
        why = getattr(error, "reason", error)
        print(f"{endpoint} does not answer ({why}): only what was downloaded before is read.", file=sys.stderr)
