"""Listening events: raw files to a store of columns, windows of time, histories, batches."""
