"""Training drafts: text that the target writes itself, the losses, and the loop that runs them."""
