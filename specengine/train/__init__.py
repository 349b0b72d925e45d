"""Train draft heads and classifiers: self-written text, losses, training loops."""
