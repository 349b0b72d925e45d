"""The server: OpenAI's chat and completions over HTTP, from one engine."""
