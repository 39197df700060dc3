"""The sources of notices."""
