"""The MLPerf reference's files and cache: written, and opened as they are."""
