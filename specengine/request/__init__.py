"""What a generation is asked for and gives: options, prompts, sampling, stopping."""
