"""recperf trains recommendation models, measures them and explains what limits them."""

__version__ = "0.1.0"
