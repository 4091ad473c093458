"""Operators with several implementations: a short reference that defines the result, and faster ones."""
