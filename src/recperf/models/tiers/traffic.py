"""What a cache of table rows looked up and moved."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Traffic:
    """What was looked up and moved since the start."""

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
    """Part of it spent waiting for a batch to be finished, so that rows could leave."""
    exposed_s: float = 0.0
    """Time that steps waited for their batches, rows included."""

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))

    def of_a_batch(self) -> dict[str, float]:
        """Figures of a mean batch."""
        batches = max(1, self.batches)
        return {
            "rows": self.rows / batches,
            "hit_rate": self.hits / max(1, self.rows),
            "fetched_bytes": self.fetched_bytes / batches,
            "written_back_bytes": self.written_back_bytes / batches,
            "placing_ms": 1e3 * (self.busy_s - self.wait_s) / batches,
            "exposed_ms": 1e3 * self.exposed_s / batches,
        }
