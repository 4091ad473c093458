"""What the byte of a stored event says, and the limits of ids. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

MOST_ID: Final = (1 << 31) - 1
"""Batches store ids as int32."""
DAY_S: Final = 86_400

POSITIVE, LIKE, NEGATIVE = 1, 2, 4
"""Bits of an event: its label or rating is positive, or it has neither; an item was liked apart from any label; the
label or rating is negative. dlrm-v4 reads them as one number."""
ACTION_BITS: Final = POSITIVE | LIKE | NEGATIVE
LABELLED: Final = POSITIVE | NEGATIVE
DRAWN: Final = 128
"""Bit 7: a negative that an import drew. It is no action, so that no history contains it, but it is an anchor."""
ANCHORS: Final = LABELLED | DRAWN
"""Events that a label can be predicted of. Bits 3 to 6 are of stores with further facts about an event."""
