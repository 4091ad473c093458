"""Telling that memory ran out: Python has an error for it, the system a number, torch only words. Torch-free."""

from __future__ import annotations

import errno
import re

_WORDS = re.compile("out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.IGNORECASE)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, of the host's or of a device's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None)
