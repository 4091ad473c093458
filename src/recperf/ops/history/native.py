"""Histories by a small C file. Not written yet: the reference serves."""

from __future__ import annotations


def library() -> str:
    """Why there is no compiled library."""
    return "there is no C body yet"
