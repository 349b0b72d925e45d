"""Measuring ways of decoding against each other: prompts, ways, the interleaved run, its log and its tables."""
