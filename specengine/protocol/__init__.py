"""OpenAI's protocol, for the server and for batches: requests, answers and errors."""
