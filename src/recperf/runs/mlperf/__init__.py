"""MLPerf Training logs of recperf and of other programs: writing, checking, comparing, packaging."""
