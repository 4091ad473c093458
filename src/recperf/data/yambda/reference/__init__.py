"""The files and the cache of the MLPerf reference: written, opened and verified."""
