"""Criteo click logs: tab-separated files, converted once to memory-mapped arrays, read in a seeded order."""
