"""Saves of a run that may fail: it goes on, and tries the next one."""

import time
from collections.abc import Callable

from shardwright.cluster.watch import pause
from shardwright.run.report import tell
from shardwright.run.stores import agreed

MAX_FAILED = 3
"""Number of saves that fail one after the other before the run ends."""
AGAIN_S = 5.0
"""Seconds from a failure after the last step to the next try."""


class Saves:
    """The saves of a run, each written in the background. All processes make the same calls.

    Args:
        wait: waits for the save that was begun last. Raises OSError if it failed.
    """

    def __init__(self, wait: Callable[[], None]):
        self._wait, self._failed = wait, 0

    def save(self, begin: Callable[..., None], is_last: bool) -> None:
        """Begins a save when the one before has ended. One that is the last is waited for, and tried again if it fails.

        Args:
            begin: begins it; with again=True where one of the same step has failed.
            is_last: whether no save may follow.

        Raises:
            OSError: MAX_FAILED saves failed, one after the other.
        """
        self._has_ended("The run goes on, and saves the next one.")
        begin()
        while is_last and not self._has_ended("It is tried again."):
            time.sleep(AGAIN_S)
            begin(again=True)

    def _has_ended(self, then: str) -> bool:
        """Waits. Whether the save that was begun last, if any, is complete; if not, says what is done then."""
        try:
            with pause("waiting for a checkpoint to be written"):
                agreed(self._wait)
        except OSError as error:
            self._failed += 1
            if self._failed == MAX_FAILED:
                raise OSError(f"{error} {MAX_FAILED} checkpoints in a row were not saved.") from error
            tell(f"WARNING: {error} {then}")
            return False
        self._failed = 0
        return True
