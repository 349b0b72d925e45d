"""Compare methods of decoding: prompts, methods, the interleaved run, its log and its tables."""
