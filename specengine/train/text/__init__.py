"""Text that a model writes itself, to train on."""
