"""One request: options, prompts, sampling, stopping, grammars, text."""
