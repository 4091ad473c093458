"""A model of power cuts: records the file operations of a block, and replays what a disk may have kept of them.

The model, after ALICE (OSDI 2014) and CrashMonkey (OSDI 2018): what was written to a file may be lost, torn or read as
zeros until that file is synced; an entry of a folder (a new file, a rename, a removal) may be missing until that folder
is synced, however long its file is synced already. Entries of one folder reach the disk in their order, or one of them
is lost alone; different files and folders know no order. A sync of a file does not sync its name.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = 0


@dataclass(frozen=True)
class Op:
    """One operation on a node, which is a file or a folder; `sync` makes all before it on that node durable."""

    kind: str
    """write, truncate or sync of a file; enter, leave, move or sync of a folder."""
    node: int
    name: str = ""
    to: str = ""
    """The new name of an entry that moves within its folder."""
    child: int = -1
    offset: int = 0
    data: bytes = b""


@dataclass
class Tree:
    """Files and folders by number: names are entries of folders, so that what is in a file does not depend on them."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> Tree:
        tree = cls()
        tree._read(root, ROOT)
        return tree

    def _read(self, place: Path, node: int) -> None:
        for path in sorted(place.iterdir()):
            child = self.new()
            self.folders[node][path.name] = child
            if path.is_dir():
                self.folders[child] = {}
                self._read(path, child)
            else:
                self.files[child] = path.read_bytes()

    def new(self) -> int:
        return max([*self.folders, *self.files]) + 1

    def copy(self) -> Tree:
        return Tree({node: dict(entries) for node, entries in self.folders.items()}, dict(self.files))

    def find(self, parts: tuple[str, ...]) -> int | None:
        node: int | None = ROOT
        for part in parts:
            node = self.folders.get(-1 if node is None else node, {}).get(part)
        return node

    def apply(self, op: Op) -> None:
        if op.kind == "write":
            content = self.files[op.node].ljust(op.offset, b"\0")
            self.files[op.node] = content[: op.offset] + op.data + content[op.offset + len(op.data) :]
        elif op.kind == "truncate":
            self.files[op.node] = self.files[op.node][: op.offset].ljust(op.offset, b"\0")
        elif op.kind == "enter":
            self.folders[op.node][op.name] = op.child
        elif op.kind == "leave":
            self.folders[op.node].pop(op.name, None)
        elif op.kind == "move" and op.name in self.folders[op.node]:
            self.folders[op.node][op.to] = self.folders[op.node].pop(op.name)

    def content(self) -> dict[str, bytes | None]:
        """Every path that can be reached, with the content of files; None for a folder."""
        found: dict[str, bytes | None] = {}
        waiting = [("", ROOT)]
        while waiting:
            place, node = waiting.pop()
            for name, child in self.folders[node].items():
                path = f"{place}{name}"
                found[path] = self.files.get(child)
                if child in self.folders:
                    waiting.append((f"{path}/", child))
        return found

    def write(self, root: Path) -> None:
        for path, content in sorted(self.content().items()):
            if content is None:
                (root / path).mkdir()
            else:
                (root / path).write_bytes(content)


class Recorder:
    """Records what this process does to the files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.before = Tree.read(self.root)
        self.live = self.before.copy()
        self.ops: list[Op] = []
        self.returned: dict[str, int] = {}
        """How many operations were done when a named moment came."""
        self._handles: dict[int, tuple[int, tuple[str, ...], bool]] = {}

    def mark(self, moment: str) -> None:
        self.returned[moment] = len(self.ops)

    def _parts(self, path: Any, dir_fd: int | None) -> tuple[str, ...] | None:
        if isinstance(path, int):
            return None
        if dir_fd is not None and dir_fd in self._handles:
            return (*self._handles[dir_fd][1], os.fspath(path))
        whole = Path(os.path.abspath(os.fspath(path)))
        return whole.relative_to(self.root).parts if whole.is_relative_to(self.root) else None

    def _do(self, op: Op) -> None:
        self.ops.append(op)
        self.live.apply(op)

    def _create(self, parts: tuple[str, ...], *, folder: bool) -> int:
        child = max(self.live.new(), self.before.new())
        for tree in (self.before, self.live):
            # The node exists from the start, but can only be reached through its entry.
            if folder:
                tree.folders[child] = {}
            else:
                tree.files[child] = b""
        self._do(Op("enter", self._node(parts[:-1]), parts[-1], child=child))
        return child

    def _node(self, parts: tuple[str, ...]) -> int:
        node = self.live.find(parts)
        assert node is not None, parts
        return node

    def opened(self, handle: int, parts: tuple[str, ...], *, truncate: bool, append: bool) -> None:
        node = self.live.find(parts)
        if node is None:
            node = self._create(parts, folder=False)
        elif truncate and self.live.files[node]:
            self._do(Op("truncate", node))
        self._handles[handle] = (node, parts, append)

    def written(self, handle: int, at: int, data: bytes) -> None:
        if handle in self._handles and data:
            node, _, append = self._handles[handle]
            self._do(Op("write", node, offset=len(self.live.files[node]) if append else at, data=data))

    def truncated(self, handle: int, size: int) -> None:
        if handle in self._handles and size != len(self.live.files[self._handles[handle][0]]):
            self._do(Op("truncate", self._handles[handle][0], offset=size))

    def moved(self, source: tuple[str, ...], target: tuple[str, ...]) -> None:
        assert source[:-1] == target[:-1], "the model knows no rename from one folder to another"
        self._do(Op("move", self._node(source[:-1]), source[-1], to=target[-1]))

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        opening = self._open(io.open)
        opens = mock.patch.object(io, "open", opening), mock.patch.object(builtins, "open", opening)
        with mock.patch.multiple(os, **self._functions()), opens[0], opens[1]:
            yield self

    def _functions(self) -> dict[str, Any]:
        real = {name: getattr(os, name) for name in ("open", "write", "close", "ftruncate", "fsync", "link")}
        recorder = self

        def opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            handle = real["open"](path, flags, mode, dir_fd=dir_fd)
            parts = recorder._parts(path, dir_fd)
            recorder._handles.pop(handle, None)
            if parts is not None:
                recorder.opened(handle, parts, truncate=bool(flags & os.O_TRUNC), append=bool(flags & os.O_APPEND))
            return int(handle)

        def write(handle: int, data: Any) -> int:
            at = os.lseek(handle, 0, os.SEEK_CUR) if handle in recorder._handles else 0
            count = real["write"](handle, data)
            recorder.written(handle, at, bytes(memoryview(data).cast("B")[:count]))
            return int(count)

        def close(handle: int) -> None:
            recorder._handles.pop(handle, None)
            real["close"](handle)

        def ftruncate(handle: int, size: int) -> None:
            real["ftruncate"](handle, size)
            recorder.truncated(handle, size)

        def fsync(handle: int) -> None:
            real["fsync"](handle)
            if handle in recorder._handles:
                recorder._do(Op("sync", recorder._handles[handle][0]))

        def link(source: Any, target: Any, **options: Any) -> None:
            real["link"](source, target, **options)
            pair = recorder._parts(source, None), recorder._parts(target, None)
            if pair[0] is not None and pair[1] is not None:
                child = recorder._node(pair[0])
                recorder._do(Op("enter", recorder._node(pair[1][:-1]), pair[1][-1], child=child))

        moves = {name: self._moving(getattr(os, name)) for name in ("rename", "replace")}
        changes = {name: self._changing(name, getattr(os, name)) for name in ("mkdir", "rmdir", "unlink", "remove")}
        own = {"open": opening, "write": write, "close": close, "ftruncate": ftruncate, "fsync": fsync, "link": link}
        return own | moves | changes

    def _moving(self, real: Any) -> Any:
        def move(source: Any, target: Any, **options: Any) -> None:
            real(source, target, **options)
            pair = self._parts(source, None), self._parts(target, None)
            if pair[0] is not None and pair[1] is not None:
                self.moved(*pair)  # type: ignore[arg-type]

        return move

    def _changing(self, name: str, real: Any) -> Any:
        def change(path: Any, *arguments: Any, dir_fd: int | None = None) -> None:
            real(path, *arguments, dir_fd=dir_fd)
            parts = self._parts(path, dir_fd)
            if parts is None:
                return
            if name == "mkdir":
                self._create(parts, folder=True)
            else:
                self._do(Op("leave", self._node(parts[:-1]), parts[-1]))

        return change

    def _open(self, real: Any) -> Any:
        """`open` whose unbuffered layer records: Python's own files do not call the functions of `os`."""
        recorder = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                handle = self.fileno()
                at = self.tell() if handle in recorder._handles else 0
                count = super().write(data)
                recorder.written(handle, at, bytes(memoryview(data).cast("B")[:count]))
                return count

            def truncate(self, size: int | None = None) -> int:
                size = super().truncate(size)
                recorder.truncated(self.fileno(), size)
                return size

            def close(self) -> None:
                if not self.closed:
                    recorder._handles.pop(self.fileno(), None)
                super().close()

        def opening(file: Any, mode: str = "r", buffering: int = -1, *arguments: Any, **options: Any) -> Any:
            parts = recorder._parts(file, None)
            ours = file in recorder._handles if isinstance(file, int) else parts is not None
            if not ours or not set(mode) & set("wxa+"):
                return real(file, mode, buffering, *arguments, **options)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd=options.pop("closefd", True))
            if parts is not None:
                recorder.opened(raw.fileno(), parts, truncate="w" in mode, append="a" in mode)
            layered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return layered if "b" in mode else io.TextIOWrapper(layered, *arguments, **options)

        return opening

    def states(self, *, choices: int | None = None) -> Iterator[tuple[int, str, Tree]]:
        """Every different state that a cut may leave, with the number of operations done before it and a name.

        With `choices` only so many of what may be left at a moment: 2 are everything, and only what is synced.
        """
        seen: set[Any] = set()
        for done in range(len(self.ops) + 1):
            for name, ops in islice(self._kept(done), choices):
                tree = self.before.copy()
                for op in ops:
                    tree.apply(op)
                state = (hash(frozenset(tree.content().items())), self.passed(done))
                if state not in seen:
                    seen.add(state)
                    yield done, name, tree

    def passed(self, done: int) -> tuple[str, ...]:
        """The moments that had come by then."""
        return tuple(moment for moment, count in self.returned.items() if count <= done)

    def _kept(self, done: int) -> Iterator[tuple[str, list[Op]]]:
        """What may be left of the first operations: the durable ones, and representative choices of the others."""
        ops = self.ops[:done]
        synced = {op.node: index for index, op in enumerate(ops) if op.kind == "sync"}
        loose: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            if op.kind != "sync" and index > synced.get(op.node, -1):
                loose.setdefault(op.node, []).append(index)
        unsynced = {index for indices in loose.values() for index in indices}

        def without(lost: set[int], changed: dict[int, Op] | None = None) -> list[Op]:
            return [(changed or {}).get(index, op) for index, op in enumerate(ops) if index not in lost]

        yield "everything", without(set())
        yield "only what is synced", without(unsynced)
        for node, indices in loose.items():
            own = set(indices)
            yield f"all but node {node}", without(own)
            yield f"of the unsynced only node {node}", without(unsynced - own)
            for count in range(1, len(indices)):
                lost = set(indices[count:])
                yield f"the first {count} of node {node}", without(lost)
                yield f"only the first {count} of node {node}", without((unsynced - own) | lost)
            for index in indices:
                yield f"all but operation {index}", without({index})
                op = ops[index]
                if op.kind == "write":
                    torn = Op("write", op.node, offset=op.offset, data=op.data[: len(op.data) // 2])
                    zeros = Op("write", op.node, offset=op.offset, data=bytes(len(op.data)))
                    for word, other in (("torn", torn), ("zeros", zeros)):
                        yield f"operation {index} {word}", without(set(), {index: other})
                        yield f"operation {index} {word}, nothing else", without(unsynced - {index}, {index: other})
