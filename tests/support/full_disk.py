"""A full disk, without one."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(size: int):
    """No file may grow beyond `size` bytes: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
