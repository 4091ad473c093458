"""Rows with a label, imported from a user's file, as memory-mapped arrays with named columns."""
