"""How much memory a measurement may take: never more than a quarter of what is free."""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 4

GRAIN = 1 << 16
"""Tables are whole multiples of this, so that rows of every size fit them."""

CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def free_bytes() -> int:
    """Memory a new allocation can have without pushing anybody out; a container's limit counts."""
    return min([_system_free(), *_container_free()])


def _system_free() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    try:
        # Systems that do not say what is free: half of what is installed is a cautious guess.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError):
        return 2 << 30


def _container_free() -> list[int]:
    for limit_name, used_name in CGROUPS:
        folder = Path("/sys/fs/cgroup")
        try:
            limit, used = (folder / limit_name).read_text(), (folder / used_name).read_text()
            return [max(0, int(limit) - int(used))]
        except (OSError, ValueError):
            continue
    return []


def bounded(wanted: int, allowed: int) -> int:
    """The wanted bytes, or what is allowed, in whole grains and at least one."""
    return max(GRAIN, min(wanted, allowed) // GRAIN * GRAIN)
