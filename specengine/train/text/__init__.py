"""Training text that the target writes itself."""
