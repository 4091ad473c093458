"""micro-dlrm on the ratings of books."""

from __future__ import annotations

from recperf.workloads.micro_dlrm.build import PreparedClicks

from .config import BooksConfig, sized


class PreparedBooks(PreparedClicks):
    def __init__(self, config: BooksConfig) -> None:
        super().__init__(sized(config))
