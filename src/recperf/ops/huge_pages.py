"""Memory in 2 MiB pages: reading a random row of a large table misses the TLB too, and with 4 KiB pages the page table
itself misses the caches."""

from __future__ import annotations

import ctypes

from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask the kernel to back a tensor that was not written yet with 2 MiB pages; return whether it agreed."""
    if tensor.device.type != "cpu" or tensor.nbytes < 4 * HUGE_PAGE:
        return False
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - begin
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(begin, length, MADV_HUGEPAGE) == 0)
