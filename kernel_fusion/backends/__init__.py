"""The backends."""
