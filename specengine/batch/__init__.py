"""A file of prompts answered into a file of answers: the same bytes however often it is interrupted."""
