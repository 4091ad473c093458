"""The fields of an MLPerf submission that no run can find out by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import require


@dataclass(frozen=True, kw_only=True)
class SubmissionConfig:
    log: bool = False
    """Write mlperf.log into the run's folder, following the rules of MLPerf Training 6.1."""
    org: str = "recperf"
    """Name of the organisation that submits."""
    division: Literal["closed", "open"] = "closed"
    """Closed: the benchmark's own model and learning rates. Open: your own."""
    status: Literal["onprem", "cloud", "preview", "research"] = "research"
    """Availability category of the system (MLPerf rules): on-premise, cloud, preview or research."""
    platform: str = "auto"
    """Name of the system; auto uses the number and name of the accelerators, or the name of the CPU."""
    cache_clear: bool = False
    """Set this if you cleared the system's caches before the run, as the rules require; recperf cannot do it."""
    config_filename: str = "config.json"
    """Name of the file next to the log that discloses the config of the run."""

    def __post_init__(self) -> None:
        for name in ("org", "platform", "config_filename"):
            value = getattr(self, name)
            fits = bool(value.strip()) and value.isprintable() and len(value) <= 200
            require(fits, f"mlperf.{name}", value, "1 to 200 printable characters")
