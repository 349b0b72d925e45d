"""Answer a file of prompts; the answers have the same bytes however often the run is interrupted."""
