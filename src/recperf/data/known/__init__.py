"""Datasets that recperf knows by name: how a download becomes ratings or events."""
