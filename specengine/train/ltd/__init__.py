"""Training of Learning to Draft's two networks."""
