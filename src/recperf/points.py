"""Named moments at which a kill would be most unkind; tests stop a run at each of them. They do nothing else."""

from __future__ import annotations

from collections.abc import Callable

NAMES: dict[str, str] = {}
"""Every moment, and what a kill there leaves behind."""

listener: Callable[[str], None] | None = None
"""Is told of every moment that passes; set by tests alone."""


def passing(name: str) -> None:
    if listener is not None:
        if name not in NAMES:
            raise KeyError(f"{name!r} is not among points.NAMES")
        listener(name)
