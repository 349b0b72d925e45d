"""What runs a causal language model over the rows of a tree."""
