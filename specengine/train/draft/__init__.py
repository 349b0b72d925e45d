"""Train EAGLE heads."""
