"""The version of recperf."""

__version__ = "0.1.0"
