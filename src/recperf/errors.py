"""Errors a user can act on: each says what happened, where, and what to do, and carries its exit code.

Exit codes: 0 done; 2 usage; 3 bad data or config; 4 environment; 5 a gate failed; 75 stopped by SIGTERM,
SIGHUP, SIGUSR1 or SIGUSR2, a run resumably; 130 Ctrl-C after a clean save.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

quiet = False
"""Whether code without a terminal leaves out its notices: under --quiet, and on ranks other than 0."""
LONGEST = 300
"""Longer values, such as paths, are shortened in a message; JSON has them whole."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_UNDECODED = re.compile("[\udc80-\udcff]+")
"""Bytes of a path that are not UTF-8, as Python represents them."""


class RecperfError(Exception):
    """The base of every error that is reported as a message instead of a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, where: dict[str, object] | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = {key: str(value) for key, value in (where or {}).items()}
        self.fix = fix

    def lines(self) -> list[str]:
        """The message as it is printed: one `error:` line, then labelled lines."""
        labelled = [(label, shorten_middle(text)) for label, text in self.where.items()] + (
            [("try", self.fix)] if self.fix else []
        )
        width = max((len(label) for label, _ in labelled), default=0) + 1
        return [f"error: {self.what}"] + [f"  {label + ':':<{width}} {text}" for label, text in labelled]

    def as_json(self) -> dict[str, object]:
        return {"error": {"what": self.what, "where": self.where, "try": self.fix, "exit_code": self.exit_code}}


class UsageError(RecperfError):
    exit_code = 2


class DataError(RecperfError):
    exit_code = 3


class ConfigError(RecperfError):
    exit_code = 3


class ArgumentError(DataError, ValueError):
    """An operator was called with a tensor or an id that it cannot take; the message says what is allowed."""


class MachineError(RecperfError):
    """The environment is at fault: a missing package, a full disk, a folder that cannot be written."""

    exit_code = 4


class GateFailed(RecperfError):
    """A target was missed, a contract broken or two implementations disagree."""

    exit_code = 5


class Stopped(RecperfError):
    """A signal other than Ctrl-C arrived; a run has saved its state and can be resumed, a profile is made again."""

    exit_code = 75


class Interrupted(RecperfError):
    """Ctrl-C arrived; the state is saved and the run can be resumed."""

    exit_code = 130


class RecperfWarning(UserWarning):
    """Something that a caller in Python should know of a result that is returned."""


@functools.lru_cache(maxsize=1024)
def notice_once(text: str) -> None:
    """Print a note once per process unless it is quiet; of the ranks of a host, at most the first prints it."""
    if not quiet and os.environ.get("LOCAL_RANK") in (None, "", "0"):
        print(f"note: {escape_controls(text)}", file=sys.stderr, flush=True)


def escape_controls(text: str) -> str:
    """Text for a terminal: control characters, which could move the cursor or hide text, are written as escapes.

    So are those that reverse the direction of text, and line separators; newlines and tabs stay. Bytes that are not
    UTF-8 are written as a shell reads them: a path can be pasted back.
    """
    text = _UNDECODED.sub(lambda match: "$'" + "".join(f"\\x{ord(one) - 0xDC00:02x}" for one in match[0]) + "'", text)
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shorten_middle(text: str, longest: int = LONGEST) -> str:
    """Text of which the middle is left out where it is too long: beginning and end of a path tell most."""
    half = longest // 2 - 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: `; did you mean 'batch'?`, or nothing."""
    guess = closest(word, known)
    return f"; did you mean {guess!r}?" if guess else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word a misspelt one probably meant."""
    # A file may have very many columns; comparing a word with each takes a while.
    matches = get_close_matches(word, list(islice(known, 1000)), n=1, cutoff=0.55)
    return matches[0] if matches else None
