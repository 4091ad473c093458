"""Made-up logs to import: make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ...errors import UsageError
from ..parse import OutputOptions
from ..terminal import Terminal
from .output import print_facts as say

__all__ = ["OPTIONS", "perform", "say"]


@dataclass(frozen=True, kw_only=True)
class Make(OutputOptions):
    name: tyro.conf.Positional[str]
    """Log: ratings-like (explicit ratings with genres, few per user) or sessions-like (clicks without a label in
    sessions, on items whose popularity fades)."""
    path: Path | None = None
    """CSV file to write; an existing file is not changed."""
    seed: int = 7
    """Seed of the synthetic data."""


OPTIONS: dict[str, Any] = {"make": Make}


def perform(action: str, options: Make, terminal: Terminal) -> dict[str, Any]:
    if options.path is None:
        fix = f"recperf data make {options.name} --path FILE"
        raise UsageError("data make needs --path, the file to write", fix=fix)
    from ...data.own_like import make

    return make(options.name, path=options.path, seed=options.seed)
