"""Compiles and runs the C body of every op on a tiny input, against its reference."""

from __future__ import annotations

import importlib
from pathlib import Path


def names() -> list[str]:
    """The ops with a C body. A `native.py` whose `native.c` was not installed counts: its check fails."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/native.py"))


def problem(name: str) -> str | None:
    """The reason why the C body of an op cannot be used, after compiling and running it; None if it works."""
    body = importlib.import_module(f"{__package__}.{name}.native")
    library = body.library()
    if isinstance(library, str):
        return library
    try:
        body.self_check()
    except Exception as error:
        return f"wrong result: {str(error).strip().splitlines()[0]}"
    return None
