"""What a rule over the source of a program found. Torch-free."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from .program_source import Edit


class Finding(NamedTuple):
    """A place of a program that a rule would change."""

    name: str
    """Of the advice."""
    nodes: Sequence[ast.AST]
    """What takes the time."""
    seen: str
    """The beginning of a sentence that the share of the step ends."""
    change: str
    edits: Sequence[Edit] = ()
    changes: str = ""
    """What the edit does not keep; empty: it keeps the results."""
    reason: str = ""
    """Why there is no edit."""
    always: bool = False
    """Whether its time is not at its lines, so that it is tried whatever they take."""
    agrees: bool = False
    """Whether it is one only where the operators of a step show the same: then it is their advice, as an edit."""
    works: str = ""
    """The operators that it saves, part of their names, where they have no line."""
