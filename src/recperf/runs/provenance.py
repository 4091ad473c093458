"""Where a result comes from: the code, the packages, the machine, the command."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("recperf", "torch", "numpy", "triton", "tyro", "rich", "pooch")


def checkout() -> dict[str, Any]:
    """Commit and whether files differ from it; nulls where recperf does not run from a checkout of its own."""
    source = Path(__file__).resolve().parents[3]
    unknown = {"commit": None, "dirty": None}
    if not (source / ".git").exists() or not (source / "src" / "recperf").is_dir():
        return unknown
    commit = _git(source, "rev-parse", "HEAD")
    if commit is None:
        return unknown
    return {"commit": commit, "dirty": bool(_git(source, "status", "--porcelain"))}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def packages() -> dict[str, str]:
    """Installed versions of what a result may depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Facts about this machine that do not change from call to call, and a fingerprint of exactly those."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "caches": caches(),
        "memory_gib": memory_gib(),
        "gpus": gpus(),
        "torch": packages().get("torch"),
    }
    return {**facts, "fingerprint": fingerprint(facts)}


def fingerprint(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" in named:
        return named["model name"]
    # ARM kernels print numbers only; lscpu knows the names.
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    for line in listed.splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return f"implementer {named.get('CPU implementer', '?')} part {named.get('CPU part', '?')}"


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


def memory_gib() -> int | None:
    """Installed memory, in whole GiB: the kernel's own share varies from boot to boot."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))
    except (ValueError, OSError):
        return None


def gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_gib": round(p.total_memory / (1 << 30))} for p in properties]


def available_bytes() -> int:
    """Memory that can be taken now. Not a static fact, so no part of the fingerprint."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return (memory_gib() or 4) << 30
