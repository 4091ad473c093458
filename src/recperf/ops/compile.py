"""Small C files, compiled once with the machine's own compiler, kept in the cache folder, called on several threads."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..places import home

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-march=native")


def load(source: Path) -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler on this machine"
    built = _build(compiler, source)
    if isinstance(built, str):
        return built
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        return f"the compiled file does not load: {error}"


def _build(compiler: str, source: Path) -> Path | str:
    """Compile into the cache folder under a name made of everything that goes in; reuse what is there."""
    asked = subprocess.run([compiler, "-v", *FLAGS[-1:], "-E", "-x", "c", os.devnull], capture_output=True, check=False)
    key = hashlib.sha256(source.read_bytes() + " ".join(FLAGS).encode() + asked.stderr).hexdigest()[:16]
    built = home() / "native" / f"{source.parent.name}-{key}.so"
    if built.exists():
        return built
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=built.parent, suffix=".so", delete=False) as fresh:
            pass
        words = [compiler, *FLAGS, "-o", fresh.name, str(source), "-lm"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            os.unlink(fresh.name)
            return f"{compiler} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no message'}"
        os.replace(fresh.name, built)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot compile: {error}"
    return built


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="recperf-native")


def share(work: Callable[[int, int], None], cuts: list[int]) -> None:
    """Call the work between consecutive cuts, each on a thread of its own. ctypes lets go of the interpreter's lock."""
    pairs = list(zip(cuts, cuts[1:]))
    if len(pairs) == 1:
        work(*pairs[0])
        return
    rest = [_pool(len(pairs)).submit(work, *pair) for pair in pairs[1:]]
    work(*pairs[0])
    for one in rest:
        one.result()


def even_cuts(count: int, threads: int) -> list[int]:
    """Where to divide so many things between threads."""
    return [count * index // threads for index in range(threads + 1)]
