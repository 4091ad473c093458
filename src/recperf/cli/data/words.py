"""What is found, as a person reads it: a line a fact."""

from __future__ import annotations

from typing import Any

from ...units import size
from ..terminal import Terminal


def say(found: dict[str, Any], terminal: Terminal) -> None:
    for name, value in found.items():
        terminal.say(f"{name:<{_width(found)}} {shown(value)}")


def say_filled(found: dict[str, Any], terminal: Terminal) -> None:
    """What is empty is left out, and bytes are said in a unit."""
    for name, value in found.items():
        if value is not None and value not in ([], {}):
            text = f"{size(value)} ({value:,} bytes)" if name.endswith("bytes") else shown(value)
            terminal.say(f"{name:<{_width(found)}} {text}")


def _width(found: dict[str, Any]) -> int:
    return max([20, *map(len, found)])


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
