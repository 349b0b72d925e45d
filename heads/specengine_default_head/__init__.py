"""The draft heads that ship for specengine's default model, one folder per model. Data alone: specengine reads them."""
