"""What a submission says about itself and no run can find out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import require


@dataclass(frozen=True, kw_only=True)
class SubmissionConfig:
    log: bool = False
    """Write mlperf.log into the run's folder, as the rules of MLPerf Training 6.1 want it."""
    org: str = "recperf"
    """Who submits; put your organisation's name here."""
    division: Literal["closed", "open"] = "closed"
    """Closed: the benchmark's own model and rates. Open: your own."""
    status: Literal["onprem", "cloud", "preview", "research"] = "research"
    """How the system can be had: bought, rented, soon, or not at all."""
    platform: str = "auto"
    """Name of the system; auto takes the accelerator's name and number, or the processor's."""
    cache_clear: bool = False
    """Say so where you cleared the system's caches before the run, as the rules want; recperf cannot."""
    config_filename: str = "config.json"
    """The file that is disclosed as the run's config, next to the log."""

    def __post_init__(self) -> None:
        for name in ("org", "platform", "config_filename"):
            value = getattr(self, name)
            fits = bool(value.strip()) and value.isprintable() and len(value) <= 200
            require(fits, f"mlperf.{name}", value, "1 to 200 printable characters")
