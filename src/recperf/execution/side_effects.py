"""What a program does outside of its memory: files that it writes, removes or renames, connections, processes, its
standard input.

An audit hook sees what functions of Python do, and `torch.save` tells it too. It does not see what C extensions do by
themselves; where files are refused, Landlock stops these on Linux.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import torch

from ..measure.places import USER, Stacks
from .program_hooks import patched

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TOOLS = ("torch._inductor", "torch._dynamo", "triton", "recperf.measure", "recperf.ops")
"""Packages that write and start compilers only for themselves, in their caches and in temporary folders."""
HELPERS = ("ctypes.util", "platform")
"""Modules that start processes to ask the system something."""
WORKERS = "torch.utils.data.dataloader"
FILES: dict[str, tuple[str, tuple[tuple[int, int | None], ...]]] = {
    "os.remove": ("removes", ((0, 1),)), "os.rmdir": ("removes", ((0, 1),)), "shutil.rmtree": ("removes", ((0, 1),)),
    "os.rename": ("renames", ((0, 2), (1, 3))), "os.link": ("makes", ((1, 3),)), "os.symlink": ("makes", ((1, 2),)),
    "os.mkdir": ("makes", ((0, 2),)), "os.chmod": ("changes", ((0, 2),)), "os.chown": ("changes", ((0, 3),)),
    "os.utime": ("changes", ((0, 3),)), "os.truncate": ("changes", ((0, None),)),
    "os.setxattr": ("changes", ((0, None),)), "os.removexattr": ("changes", ((0, None),)),
    "sqlite3.connect": ("writes", ((0, None),)),
}  # fmt: skip
"""Events that change files: what they do, and which of their arguments are the paths, and the folders' descriptors that
these depend on."""
STARTS = {
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
}  # fmt: skip
SENDS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
EVENTS = {*FILES, *STARTS, *SENDS, "open", "builtins.input", "tempfile.mkstemp", "tempfile.mkdtemp"}


class Refused(BaseException):
    """A program was about to change something outside; not an Exception, so that programs do not handle it."""


class SideEffects(ExitStack):
    """Notes side effects inside its `with` block, those of forked workers too; with `folder` it refuses what changes
    files outside of this folder, connects or starts processes."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.refuses = folder is not None
        self.read_input = False
        # The folder of multiprocessing may be there already.
        own = folder or current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        self._folders = [os.path.realpath(own)] if own else []
        self._stacks = Stacks()
        self.seen: list[str] = []
        """What the program did, each kind of effect once; known when the block has ended."""

    def __enter__(self) -> SideEffects:
        global _active, _installed
        super().__enter__()
        # Forked processes write to the same open file.
        self._file = self.enter_context(TemporaryFile())
        self.callback(self._read)
        if not _installed:
            _installed = True
            sys.addaudithook(_audit)
        self.enter_context(patched(torch.serialization, "_open_zipfile_writer", _audited_save))
        self.enter_context(patched(BaseProcess, "start", self._start))
        before = _active, sys.stdin
        _active = self
        if sys.stdin is not None:
            sys.stdin = _Input(sys.stdin, self)

        def leave() -> None:
            global _active
            _active, sys.stdin = before

        self.callback(leave)
        return self

    def _read(self) -> None:
        self._file.seek(0)
        self.seen = list(dict.fromkeys(self._file.read().decode().splitlines()))

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event.startswith("tempfile."):
            self._folders.append(os.path.realpath(os.fsdecode(args[0])))
        elif effect := self._effect(event, args):
            self._note(effect)

    def _effect(self, event: str, args: tuple[Any, ...]) -> str:
        """What an event changes outside; empty where it changes nothing."""
        if event == "builtins.input" or (event == "open" and args[0] == 0):
            self.read_input = True
        elif event == "open":
            # A temporary file without a name is opened as its folder.
            writes = (args[2] or 0) & WRITES and not os.path.isdir(args[0])
            return self._on_file("writes", args[0], None) if writes else ""
        elif event == "os.mkdir" and (not self.refuses or os.path.isdir(args[0])):
            # A trial finds the folders that the profiled program made.
            return ""
        elif event in FILES:
            verb, paths = FILES[event]
            effects = (self._on_file(verb, args[path], None if at is None else args[at]) for path, at in paths)
            return next(filter(None, effects), "")
        elif event in STARTS:
            return f"starts {_program(event, args)}"
        elif event in SENDS and args[0].family in (socket.AF_INET, socket.AF_INET6):
            return "connects to {}:{}".format(*args[1][:2]) if args[1] else "sends to a connection"
        elif event in SENDS and args[0].family == socket.AF_UNIX and isinstance(args[1], (str, bytes)):
            return self._on_file("connects to", args[1], None)
        return ""

    def _on_file(self, verb: str, path: Any, folder: int | None) -> str:
        """What happens to a file, unless it is in a folder that does not count."""
        if isinstance(path, int) or path in (":memory:", ""):
            return ""
        name = os.fsdecode(path)
        if folder is not None and folder >= 0:
            with suppress(OSError):
                name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        whole = os.path.realpath(name)
        inside = any(whole == one or whole.startswith(f"{one}{os.sep}") for one in self._folders)
        return "" if inside or name == os.devnull or "__pycache__" in Path(name).parts else f"{verb} {name}"

    def _note(self, effect: str) -> None:
        """Write an effect down with the line of the program that has it, unless a tool has it for itself."""
        among_processes = effect.startswith(("starts ", f"connects to {os.sep}"))
        frame, place = sys._getframe(), ""
        while frame.f_back is not None:
            frame = frame.f_back
            module = frame.f_globals.get("__name__", "")
            if module.startswith(TOOLS) or (among_processes and module in (*HELPERS, WORKERS)):
                return
            kind, file = self._stacks.file(frame.f_code.co_filename)
            if kind == USER:
                place = f" ({file}:{frame.f_lineno})"
                break
        os.write(self._file.fileno(), f"{effect}{place}\n".encode())
        if self.refuses:
            raise Refused(f"the program {effect}{place}")

    def _start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def start(process: Any) -> None:
            if getattr(process, "_start_method", None) not in (None, "fork"):
                # What it does is not seen.
                os.write(self._file.fileno(), b"starts a process that is not forked\n")
            original(process)

        return start


_active: SideEffects | None = None
_installed = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """The hook, which cannot be removed."""
    if _active is not None and event in EVENTS:
        _active.audit(event, args)


def _program(event: str, args: tuple[Any, ...]) -> str:
    """The program that an event starts."""
    if event in ("os.fork", "os.forkpty"):
        return "a process"
    named = args[0] if event != "os.spawn" else args[1]
    return os.path.basename(os.fsdecode(named if isinstance(named, (str, bytes, os.PathLike)) else named[0]))


def _audited_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """C++ opens the file of torch.save."""

    @wraps(original)
    def opened(file: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            sys.audit("open", file, "wb", WRITES)
        return original(file)

    return opened


class _Input:
    """Standard input that notes when it is read."""

    def __init__(self, stream: TextIO, effects: SideEffects) -> None:
        self._stream, self._effects = stream, effects

    def __getattr__(self, name: str) -> Any:
        if name.startswith("read") or name in ("buffer", "detach"):
            self._effects.read_input = True
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        self._effects.read_input = True
        return iter(self._stream)


def confine(folder: Path) -> None:
    """Let the kernel refuse this process, and all that it starts, to change files outside of the folder. Does nothing
    where there is no Landlock (Linux before 5.13)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not sys.platform.startswith("linux"):
        return
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        return
    write, removes_and_makes, moves, truncate = 1 << 1, sum(1 << bit for bit in range(4, 13)), 1 << 13, 1 << 14
    every = write | removes_and_makes | (moves if version >= 2 else 0) | (truncate if version >= 3 else 0)
    rules = libc.syscall(create, ctypes.byref(ctypes.c_uint64(every)), ctypes.sizeof(ctypes.c_uint64), 0)
    # Devices, shared memory, and names of threads.
    for path in (str(folder), "/dev", "/proc"):
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        rule = every.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        libc.syscall(add, rules, 1, rule, 0)
        os.close(opened)
    no_new_privileges = 38
    libc.prctl(no_new_privileges, 1, 0, 0, 0)
    libc.syscall(restrict, rules, 0)
    os.close(rules)
