"""Facts about a dataset as text: one line per fact."""

from __future__ import annotations

from typing import Any

from ...units import size
from ..terminal import Terminal


def print_facts(facts: dict[str, Any], terminal: Terminal) -> None:
    """Print all facts that are not empty; bytes also in a human unit."""
    width = max([20, *map(len, facts)])
    for name, value in facts.items():
        if value is not None and value not in ([], {}):
            text = f"{size(value)} ({value:,} bytes)" if name.endswith("bytes") else as_text(value)
            terminal.say(f"{name:<{width}} {text}")


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
