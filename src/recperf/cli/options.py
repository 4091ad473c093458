"""Options every command around a workload's config shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import tyro

from .choose import Choice, choose
from .parse import parse

C = TypeVar("C")
"""The config class of a workload; subclasses use this very variable, so that its flags can be listed."""
T = TypeVar("T", bound="WorkloadOptions[Any]")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(Generic[C]):
    values: Annotated[C, tyro.conf.arg(name="")]
    preset: str | None = None
    """Start from this preset; `recperf list` names them."""
    config: str | None = None
    """Start from a saved config: a file, or a run's folder."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


def read_options(kind: type[T], choice: Choice, words: list[str] | None = None, *, verb: str, description: str) -> T:
    """The options of a command for the chosen workload; `words` are what is left of its command line."""
    return parse(
        kind[choice.workload.config],  # type: ignore[index]
        choice.rest if words is None else words,
        prog=f"recperf {verb} {choice.workload.name}",
        description=description,
        default=kind(values=choice.config),
    )


__all__ = ["C", "Choice", "WorkloadOptions", "choose", "read_options"]
