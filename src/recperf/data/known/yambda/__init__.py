"""Yambda, listening events: its download, its raw files, and synthetic events like it."""
