"""The server: OpenAI's API over HTTP."""
