"""Compiles the small C file of an op once, with the machine's own compiler, and calls it on several threads.

Libraries are cached under a name that is a digest of everything that goes in: source, flags, compiler, processor. Each
ends with a digest of its content. A file that does not match its digest would crash the process that calls it, so it is
compiled again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import MachineError, notice_once
from ..files import write_atomic
from ..folders import one_at_a_time, temporary_folder
from ..locations import home, user_home
from ..stop import call

FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-march=native")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

COMPILER_SECONDS = 120
"""The compiler is stopped after this time. Our largest file takes about two seconds, on a busy machine more."""
DIGEST_BYTES = hashlib.sha256().digest_size
MISSING = "is missing"
MOST_BYTES = 64 << 20
"""No library of ours is larger; a larger file is not read."""

I64, F32, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

extra_flags: tuple[str, ...] = ()
"""`SANITIZERS` in a run of the tests under the sanitizers; set before anything is compiled."""


_stuck: dict[str, str] = {}
"""Compilers that did not end in time, and the message: the other ops do not wait for them again."""


def load(source: Path, functions: Mapping[str, Any], returns: Mapping[str, Any] | None = None) -> ctypes.CDLL | str:
    """The compiled library, or the reason why it cannot be used. `functions`: the argument types of each."""
    library = _load(source)
    if isinstance(library, str):
        notice_once(f"{library}: only the slower reference operators can be used")
        return library
    for name, arguments in functions.items():
        getattr(library, name).argtypes = list(arguments)
        getattr(library, name).restype = (returns or {}).get(name)
    return library


def _load(source: Path) -> ctypes.CDLL | str:
    home()  # A cache folder that is set wrongly is an error, not a reason to be slow.
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler on this machine"
    try:
        path = folder() / f"{source.parent.name}-{_key(compiler, source)}.so"
        handle = cached(path, lambda: _compile(compiler, source, path))
    except (_CompilerFailed, MachineError) as error:
        return str(error)
    except OSError as error:
        return f"the C code cannot be compiled: {error}"
    if isinstance(handle, str):
        return f"the compiled library {path} {handle}"
    try:
        # The very file that was verified. It stays open: dlopen knows libraries by their names.
        opened = f"/proc/self/fd/{handle}"
        return ctypes.CDLL(opened if os.path.exists(opened) else str(path))
    except OSError as error:
        os.close(handle)
        return f"the compiled library {path} does not load: {error}"


def cached(path: Path, make: Callable[[], None]) -> int | str:
    """A descriptor of a file in the cache, or what is wrong with it; `make` writes it if it is missing or damaged."""
    handle = _verified(path)
    if isinstance(handle, str):
        with one_at_a_time(path.parent / "lock"):
            # Another process may have written it while this one waited.
            handle = _verified(path)
            if isinstance(handle, str):
                if handle != MISSING:
                    notice_once(f"the compiled library {path} {handle}: it is compiled again")
                make()
                handle = _verified(path)
    return handle


def folder() -> Path:
    """The folder of the libraries, in the cache folder: but no code is loaded from one of another user."""
    for place in (home() / "native", home()):
        if place.is_dir():
            return (home() if place.stat().st_uid == os.getuid() else user_home()) / "native"
    return home() / "native"


def _verified(path: Path) -> int | str:
    """A descriptor of the library if nobody else can have written it and its digest holds; otherwise what is wrong."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return "is a link" if path.is_symlink() else f"cannot be read ({error.strerror})"
    fault = _fault(handle, path.name)
    if fault is None:
        return handle
    os.close(handle)
    return fault


def _fault(handle: int, name: str) -> str | None:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_uid not in (0, os.getuid()):
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    if not DIGEST_BYTES < status.st_size <= MOST_BYTES:
        return "is damaged"
    with open(handle, "rb", closefd=False) as file:
        content = file.read()
    intact = _digest(name, content[:-DIGEST_BYTES]) == content[-DIGEST_BYTES:]
    return None if intact else "is damaged"


def _digest(name: str, content: bytes) -> bytes:
    """The digest at the end of a library; with its name, so that one is not taken for another."""
    return hashlib.sha256(name.encode() + content).digest()


def native_library(
    module: str, functions: Mapping[str, Any], returns: Mapping[str, Any] | None = None
) -> Callable[[], ctypes.CDLL | str]:
    """A function that loads the native.c beside a module file, which is compiled at the first call only."""
    return functools.cache(lambda: load(Path(module).with_name("native.c"), functions, returns))


def usable(library: ctypes.CDLL | str) -> ctypes.CDLL:
    """The library; a body that is called although it cannot be compiled is an error."""
    if isinstance(library, str):
        raise MachineError(f"the C body cannot be used: {library}", fix="use the reference implementation")
    return library


class _CompilerFailed(Exception):
    """The compiler cannot be used; the text says which one, and why."""


def _key(compiler: str, source: Path) -> str:
    """A digest of everything that determines the compiled file."""
    flags = " ".join((*FLAGS, *extra_flags, "digest with name"))
    files = b"".join(file.read_bytes() for file in (source, *sorted(Path(__file__).parent.glob("*.h"))))
    return hashlib.sha256(files + flags.encode() + _target(compiler)).hexdigest()[:16]


@functools.cache
def _target(compiler: str) -> bytes:
    """What the compiler says about itself and about the processor that it compiles for."""
    return _call_compiler([compiler, "-v", "-march=native", "-E", "-x", "c", os.devnull])


def _call_compiler(command: list[str]) -> bytes:
    """Run the compiler and return its messages; raises where it fails or does not end."""
    if command[0] in _stuck:
        raise _CompilerFailed(_stuck[command[0]])
    # A library that is preloaded into Python, such as a sanitizer's, is not meant for the compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = call(command, timeout_s=COMPILER_SECONDS, environment=environment)
    except subprocess.TimeoutExpired:
        _stuck[command[0]] = f"the C compiler {command[0]} did not end within {COMPILER_SECONDS:g} s"
        raise _CompilerFailed(_stuck[command[0]]) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        code = done.returncode
        ended = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise _CompilerFailed(f"the C compiler {command[0]} {ended}: {said.strip()}")
    return done.stderr.encode()


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile a library into the cache, with the digest of its content at its end."""
    with temporary_folder(".draft-", beside=path.parent) as folder:
        draft = folder / path.name
        _call_compiler([compiler, *FLAGS, *extra_flags, "-o", str(draft), str(source), "-lm"])
        store(path, draft.read_bytes())


def store(path: Path, content: bytes) -> None:
    """Write a compiled file into the cache, with the digest of its content at its end."""
    write_atomic(path, content + _digest(path.name, content))
    # Whatever the umask allows: a file that others can write is not loaded.
    path.chmod(0o755)


@functools.cache
def _pool(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix=name)


def share(work: Callable[[int, int], None], cuts: list[int], *, pool: str = "recperf-native") -> None:
    """Call `work` between consecutive cuts, each range on its own thread: ctypes releases the interpreter's lock.

    `pool` names the threads; those of another name do not wait for this work.
    """
    ranges = list(zip(cuts, cuts[1:]))
    if len(ranges) == 1:
        work(*ranges[0])
        return
    others = [_pool(len(ranges), pool).submit(work, *one) for one in ranges[1:]]
    work(*ranges[0])
    for other in others:
        other.result()


def even_cuts(count: int, threads: int) -> list[int]:
    """Cuts that divide `count` items evenly between threads."""
    return [count * index // threads for index in range(threads + 1)]


def native_ops() -> list[str]:
    """The ops with a C body. A `native.py` whose `native.c` was not installed counts: its check fails."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/native.py"))


def native_problem(name: str) -> str | None:
    """The reason why the C body of an op cannot be used, after compiling it; None if it can."""
    library = importlib.import_module(f"{__package__}.{name}.native").library()
    return library if isinstance(library, str) else None
