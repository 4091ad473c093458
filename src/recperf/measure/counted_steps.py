"""The context in which the operators of a loop are counted, wherever the loop ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _push_mode

from ..ops.operators import set_call_listener
from .counting import Counter


@contextmanager
def counted(
    counter: Counter, model: nn.Module | None, optimizers: Callable[[], Iterable[Any]], thread: int
) -> Iterator[None]:
    """Inside, the counter hears of every operator of the thread. Another thread may leave it."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # A compiled function that met a dispatch mode would never run compiled again.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        counter.memory.optimizers = optimizers
        if model is not None:
            counter.memory.modules = model.modules
        counter.__enter__()  # type: ignore[no-untyped-call]
        stack.callback(_end, counter, thread)
        set_call_listener(counter.native)
        stack.callback(set_call_listener, None)
        counter.begin_step()
        yield


def _end(counter: Counter, thread: int) -> None:
    """Leave the mode. Its own thread may have ended, or another one closes the observer: then it stays active there and
    does nothing, and what torch knows about modes in general is restored by leaving it here."""
    counter.ended = True
    counter.memory.end()
    if get_ident() != thread:
        _push_mode(counter)
    counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
