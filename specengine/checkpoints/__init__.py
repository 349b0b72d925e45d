"""Files that hold a model, read as they are: what is in them, by which names, and what is wrong with them."""
