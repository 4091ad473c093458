"""What a user may choose about a training on several ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..config import require, within
from ..errors import ConfigError, closest

SHARDING = ("row", "column", "table", "data-parallel")
PLACEMENT = ("device", "host", "cached-host")
PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Only read where a run has several ranks (`recperf run --ranks N`, or torchrun)."""

    sharding: str = ""
    """How tables are divided, as item_id=row,album_id=column; row, column, table or data-parallel, which is a copy on
    every rank. The planner decides about tables that are not named."""
    placement: str = ""
    """Where tables lie, as item_id=host; device, host or cached-host, the last two with GPUs only."""
    all_to_all: Literal["fp32", "fp16", "bf16"] = "fp32"
    """What rows and their gradients are sent as."""
    pipeline: bool = True
    """Send the ids of the next batch while this one is computed. Changes no number."""
    timeout_s: float = 300.0
    """Seconds a rank waits for the others before it gives up. A save counts: until the slowest rank has written its
    parts, or looked at them, the others wait, and so they do for what rank 0 alone does of it."""

    def __post_init__(self) -> None:
        require(self.all_to_all in PRECISIONS, "distributed.all_to_all", self.all_to_all, ", ".join(PRECISIONS))
        within(1.0, self.timeout_s, 86_400.0, "distributed.timeout_s")
        self.shardings, self.placements  # noqa: B018

    @property
    def shardings(self) -> dict[str, str]:
        """By table."""
        return _pairs("distributed.sharding", self.sharding, SHARDING)

    @property
    def placements(self) -> dict[str, str]:
        return _pairs("distributed.placement", self.placement, PLACEMENT)

    def require_tables(self, tables: Iterable[str]) -> None:
        """Refuse a table that the model does not have."""
        known = tuple(tables)
        for field, named in (("sharding", self.shardings), ("placement", self.placements)):
            for table in named:
                if table not in known:
                    guess = closest(table, known)
                    raise ConfigError(
                        f"distributed.{field} names table {table!r}, which the model does not have"
                        + (f"; did you mean {guess!r}?" if guess else ""),
                        where={"field": f"distributed.{field}", "known": ", ".join(known)},
                    )


def _pairs(field: str, text: str, allowed: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        table, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not table or value not in allowed or table in found:
            wrong = "is named twice" if table in found else f"wants table=value with {', '.join(allowed)}"
            raise ConfigError(f"{field}: {part!r} {wrong}", where={"field": field, "known": ", ".join(allowed)})
        found[table] = value
    return found
