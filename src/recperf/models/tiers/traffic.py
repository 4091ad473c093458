"""What a cache of table rows looked up and moved."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Traffic:
    """What was looked up and moved, since the start or the last `reset`."""

    batches: int = 0
    rows: int = 0
    """Distinct rows of each batch, summed over the batches."""
    hits: int = 0
    """Of these, the rows that the cache held."""
    fetched: int = 0
    """Rows that were read from the store; the other misses were new and got their initial values."""
    written_back: int = 0
    fetched_bytes: int = 0
    written_back_bytes: int = 0
    busy_s: float = 0.0
    """Time that placing took, beside the steps."""
    wait_s: float = 0.0
    """Part of it spent finding rows that could leave, or waiting for a step to end so that they could."""
    exposed_s: float = 0.0
    """Time that steps waited for their batches, rows included."""

    def reset(self) -> None:
        for one in fields(self):
            setattr(self, one.name, one.default)

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))
