"""The draft head that ships for Qwen2.5-Coder-1.5B-Instruct. Data alone: specengine reads it."""
