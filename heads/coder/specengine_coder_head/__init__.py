"""The draft heads that ship for Qwen2.5-Coder-0.5B and 1.5B-Instruct. Data alone: specengine reads them."""
