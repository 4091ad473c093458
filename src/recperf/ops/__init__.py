"""The arithmetic with more than one implementation: a short reference that defines what is right, and faster ones."""
