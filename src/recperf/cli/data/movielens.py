"""MovieLens: get, check, info."""

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
class Options(OutputOptions):
    name: tyro.conf.Positional[str]
    """Dataset."""
    path: Path | None = None
    """Folder of the dataset; default: the cache folder."""
    seed: int = 7
    """Seed of the synthetic dataset."""


OPTIONS: dict[str, Any] = dict.fromkeys(("get", "check", "info"), Options)


def perform(action: str, options: Options, terminal: Terminal) -> dict[str, object]:
    from ...data import catalogue

    if action == "get" and options.path is not None:
        what = "data get stores datasets in the cache folder and has no --path"
        raise UsageError(what, fix="set RECPERF_HOME to choose the folder")
    if action == "get":
        return catalogue.get(options.name, say=terminal.say)
    if action == "check":
        return catalogue.check(options.name, path=options.path)
    return catalogue.info(options.name, path=options.path, seed=options.seed)
