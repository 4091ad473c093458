"""The waits of a step for other ranks: torch.distributed's collectives, listened to while a window is measured.

TorchRec and our own code call them by their name in torch.distributed, so that is where a watch stands. Each wait is a
span of its own, `<part>_exchange`, and notes three moments: when this rank came to the collective, and when it began
and ended to wait for it. All ranks come to the same collectives in the same order, which makes the moments of
different ranks comparable: the last one to come is the one the others waited for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, NamedTuple

from torch import Tensor, distributed

from ..measure import spans

NAMES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip


class Wait(NamedTuple):
    """A rank's wait for a collective; moments in ns."""

    number: int
    """Which collective since the watch began; the same one on every rank."""
    what: str
    part: str
    """The part of the step it is in."""
    came: int
    began: int
    ended: int
    bytes: int
    """What this rank hands in."""


class WaitLog:
    """Notes the waits of some steps."""

    def __init__(self) -> None:
        self.steps: list[list[Wait]] = []
        self._count = 0
        self._noting = False

    @contextmanager
    def installed(self) -> Iterator[WaitLog]:
        """Stand before torch.distributed. Not only in noted steps: one may wait for what an earlier one began."""
        before = {name: getattr(distributed, name) for name in NAMES}
        for name, call in before.items():
            setattr(distributed, name, self._watched(name, call))
        try:
            yield self
        finally:
            for name, call in before.items():
                setattr(distributed, name, call)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Note the waits of a step."""
        self.steps.append([])
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(call).parameters)
        # A reduction in place has nothing but the one tensor; elsewhere what is handed in comes second.
        given, later = 0 if name == "all_reduce" else 1, names.index("async_op")

        def asked(place: int, words: tuple[Any, ...], more: dict[str, Any]) -> Any:
            return words[place] if len(words) > place else more.get(names[place])

        @functools.wraps(call)
        def watched(*words: Any, **more: Any) -> Any:
            self._count += 1
            meant = _Meant(self, self._count, name, monotonic_ns(), _bytes(asked(given, words, more)))
            if not asked(later, words, more):
                return meant.wait(lambda: call(*words, **more))
            work = call(*words, **more)
            return _Later(work, meant) if work is not None else None

        return watched

    def note(self, wait: Wait) -> None:
        if self._noting:
            self.steps[-1].append(wait)


class _Meant(NamedTuple):
    """A collective this rank came to."""

    watch: WaitLog
    number: int
    what: str
    came: int
    bytes: int

    def wait(self, ends: Callable[[], Any]) -> Any:
        part = spans.inside() or "other"
        began = monotonic_ns()
        with spans.span(spans.EXCHANGE if part == spans.OTHER else f"{part}_{spans.EXCHANGE}"):
            found = ends()
        self.watch.note(Wait(self.number, self.what, part, self.came, began, monotonic_ns(), self.bytes))
        return found


class _Later(distributed.Work):
    """A collective that is waited for later; TorchRec asks whether it is a `Work`."""

    def __init__(self, work: Any, meant: _Meant) -> None:
        super().__init__()
        self._work, self._meant = work, meant

    def wait(self, *words: Any, **more: Any) -> bool:
        return bool(self._meant.wait(lambda: self._work.wait(*words, **more)))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _bytes(given: Any) -> int:
    listed = given if isinstance(given, list | tuple) else [given]
    return sum(tensor.numel() * tensor.element_size() for tensor in listed if isinstance(tensor, Tensor))
