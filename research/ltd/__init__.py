"""Learning to Draft: train the two networks of the policy ltd, and compare them with other methods."""
