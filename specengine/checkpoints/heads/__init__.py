"""Draft heads: the layouts in which they are published."""
