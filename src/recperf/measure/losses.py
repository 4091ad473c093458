"""The losses of a program, by the line that calls `backward`, and the origin of the first that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import ref

from torch import Tensor

from .learning_records import LossesSeen, NonFiniteSeen
from .looks import numbers
from .nonfinite import cause_of
from .places import LIBRARY, USER, Stacks

PENDING = 64
"""Losses on a GPU that are read together."""
MOST, FIRST = 1 << 16, 1 << 10
"""Losses of a line that are held, and how many of the first ones stay."""


class Losses:
    def __init__(self) -> None:
        self.nonfinite: NonFiniteSeen | None = None
        self._lines: dict[tuple[int, int], LossesSeen] = {}
        self._pending: list[tuple[LossesSeen, int, Tensor]] = []
        self._scaled: tuple[Any, Tensor] | None = None
        self._stacks = Stacks()

    @property
    def seen(self) -> list[LossesSeen]:
        return list(self._lines.values())

    def scaled(self, scaled: Tensor, loss: Tensor) -> None:
        """A loss that is scaled may be infinite where the loss is not."""
        self._scaled = ref(scaled), loss.detach()

    def note(self, loss: Tensor, frame: Any, step: int, names: Mapping[int, str], bad_gradient: bool) -> None:
        """A loss of one element before its backward pass, which `frame` calls."""
        value = loss
        if self._scaled is not None and self._scaled[0]() is loss:
            value = self._scaled[1]
        key = id(frame.f_code), frame.f_lasti
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = LossesSeen(place=self._place(frame), steps=[], values=[])
        first = self.nonfinite
        # A value of a GPU is waited for only where the one before it was not finite, for its graph.
        if not loss.is_cpu and (first is None or first.cause):
            self._pending.append((line, step, value.detach().clone()))
            if len(self._pending) >= PENDING:
                self.read()
            return
        number = float(value.item())
        self._note(line, step, number)
        if abs(number) < math.inf:
            return
        if (first := self.nonfinite) is not None and not first.cause:
            cause, where, first.operator = cause_of(loss, names)
            # In a later step weights do not tell what came first.
            if first.step == step or cause != "weights":
                first.cause, first.where, first.gradient = cause, where, bad_gradient

    def read(self) -> None:
        """Wait for the losses that are still on their way."""
        pending, self._pending = self._pending, []
        for (line, step, _), value in zip(pending, numbers([value for *_, value in pending])):
            self._note(line, step, value)

    def _note(self, line: LossesSeen, step: int, value: float) -> None:
        line.steps.append(step)
        line.values.append(value)
        if len(line.values) > MOST:
            del line.steps[FIRST : MOST // 2], line.values[FIRST : MOST // 2]
        if self.nonfinite is None and not abs(value) < math.inf:
            self.nonfinite = NonFiniteSeen(place=line.place, step=step, value=str(value))

    def _place(self, frame: Any) -> str:
        stack = self._stacks.stack(self._stacks.of(frame))
        own = [one for one in stack if one.kind == USER] or [one for one in stack if one.kind == LIBRARY]
        return f"{own[-1].place.file}:{own[-1].place.line}" if own else "the program"
