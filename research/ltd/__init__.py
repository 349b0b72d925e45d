"""Learning to Draft: the training of the policy ltd's two networks, and the comparisons that its claims rest on."""
