"""What the kind of a stored event says, and the limits of ids. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

MOST_ID: Final = (1 << 31) - 1
"""Batches store ids as int32."""
EVENT_TYPES: Final = ("listen", "like", "dislike", "unlike", "undislike")
"""The type of an event is an index of this tuple."""

DAY_S: Final = 86_400

LISTEN_PLUS, LIKE, SKIP = 1, 2, 4
"""Actions as bits of an event; the model reads them as one number."""
ACTION_BITS: Final = LISTEN_PLUS | LIKE | SKIP
LISTENS: Final = LISTEN_PLUS | SKIP
LEAST_PLAYED: Final = 50
"""A listen with at least this played ratio, in percent, is a listen-plus; any other is a skip."""

ORGANIC: Final = 8
TYPE_SHIFT: Final = 4
"""The kind of an event is one byte: actions in bits 0 to 2, organic in bit 3, the event type in bits 4 to 6."""
DRAWN: Final = 128
"""Bit 7: a negative that an import drew. It is no action, so that no history contains it, but it is an anchor."""
ANCHORS: Final = LISTENS | DRAWN
