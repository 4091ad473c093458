"""A file of a user, of any content: inspected, and read into a DuckDB table within a memory limit."""
