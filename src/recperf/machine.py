"""Facts about this machine: processor, caches, memory, GPUs. Importing this needs no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

from .errors import MachineError

_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|can't start new thread",
    re.IGNORECASE,
)
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, usage and details of the usage, in version 2 and version 1 of control groups."""

BFLOAT16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "bf16": "ARM"}
"""Instructions for products of bfloat16 by their names in /proc/cpuinfo, the fastest first."""


def machine_facts() -> dict[str, Any]:
    """Facts that do not change from call to call, and a fingerprint of exactly those facts."""
    facts = {**host_facts(), "gpus": gpus()}
    return {**facts, "fingerprint": fingerprint(facts)}


def host_facts() -> dict[str, Any]:
    """Those of them that need no torch: all but the GPUs."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "caches": caches(),
        "memory_gib": memory_gib(),
        "torch": _torch_version(),
    }


def fingerprint(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _torch_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" in fields:
        return fields["model name"]
    # ARM kernels print numbers only; lscpu knows the names.
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    for line in listed.splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return f"implementer {fields.get('CPU implementer', '?')} part {fields.get('CPU part', '?')}"


def bfloat16_instructions() -> str | None:
    """The processor's instructions for products of bfloat16: "" if it has none, None if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return next((name for flag, name in BFLOAT16.items() if flag in flags), "") if flags else None


def caches() -> dict[str, int]:
    """Bytes of each data cache of the first core, by level."""
    sizes: dict[str, int] = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind = (folder / "type").read_text().strip()
            level = (folder / "level").read_text().strip()
            size = (folder / "size").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction":
            sizes[f"L{level}"] = _bytes(size)
    return sizes


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_gib": round(p.total_memory / (1 << 30))} for p in properties]


def memory_gib() -> int | None:
    """Installed memory in whole GiB: the kernel's own share varies from boot to boot."""
    installed = _installed_bytes()
    return None if installed is None else round(installed / (1 << 30))


def _installed_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def usable_cores() -> int:
    """Cores that this process can use: its affinity and a container's quota count. Not part of the fingerprint."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min([len(allowed), *_container_cores(Path("/sys/fs/cgroup"))])


def _container_cores(folder: Path) -> list[int]:
    """The CPU quota of version 2 and version 1 of control groups, in whole cores; empty if there is none."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            return [max(1, math.ceil(int(quota) / int(period)))] if int(quota) > 0 else []
        except (OSError, ValueError):
            # "max" instead of a number means no quota.
            continue
    return []


def available_bytes() -> int:
    """Memory that a new allocation can use now; a container's limit counts. Not part of the fingerprint."""
    return min([_system_available_bytes(), *_container_available_bytes()])


def process_memory() -> dict[str, int]:
    """Bytes that this process has in memory: its `own`, those of `files` such as libraries, which the system can drop
    and read again, and the `peak` of both; empty where the system does not say."""
    names = {"RssAnon:": "own", "RssFile:": "files", "VmHWM:": "peak"}
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        return {names[line[0]]: int(line[1]) << 10 for line in lines if line and line[0] in names}
    except (OSError, ValueError):
        return {}


def _system_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    # Without /proc/meminfo, half of the installed memory is a cautious guess.
    return (_installed_bytes() or 4 << 30) // 2


def _container_available_bytes() -> list[int]:
    folder = Path("/sys/fs/cgroup")
    for limit_name, used_name, details_name in _CGROUP_FILES:
        try:
            limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
        except (OSError, ValueError):
            continue
        return [max(0, limit - used + _reclaimable_bytes(folder / details_name))]
    return []


def _reclaimable_bytes(details: Path) -> int:
    """File pages that count as used but are dropped when a process needs the memory."""
    try:
        values = dict(line.split() for line in details.read_text().splitlines())
        return int(values.get("total_inactive_file") or values.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def memory_error(error: BaseException, **where: object) -> MachineError:
    """The error for a user when memory of the host or of a device ran out."""
    cause = " ".join(str(error).split())[:200]
    fix = "a smaller --train.batch-size or smaller tables; --resume RUN continues a run after its last checkpoint"
    limit = address_space()
    if limit:
        where, fix = {**where, **limit}, f"ulimit -v unlimited; {fix}"
    return MachineError("out of memory", where={**where, **({"cause": cause} if cause else {})}, fix=fix)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of the host or of a device ran out; torch reports that in the message only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if isinstance(error, (RuntimeError, ImportError, OSError)):
        return _OUT_OF_MEMORY.search(str(error)) is not None or _fails_to_map(error)
    return isinstance(error, MemoryError)


def _fails_to_map(error: BaseException) -> bool:
    """Whether a library did not fit into a limited address space; a folder without execute permission says the same."""
    text = str(error)
    return "failed to map segment" in text and "not permitted" not in text and bool(address_space())


def address_space() -> dict[str, object]:
    """The limit of this process's address space for a message; empty if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    unlimited = limit == resource.RLIM_INFINITY
    return {} if unlimited else {"address space": f"limited to {limit >> 20:,} MiB (ulimit -v)"}
