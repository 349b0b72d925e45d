"""Draft heads: the layouts in which they are published, and the head that ships for the default model."""
