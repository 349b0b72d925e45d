"""DyMax: a chain that ends where the draft's best token is improbable."""

from dataclasses import dataclass

from specengine.policies.baselines._chain import StoppedChain


@dataclass
class DyMax(StoppedChain):
    """Greedy draft tokens while each has a probability of `threshold` or more; the first is always proposed.

    Source: C2T, Table 7.
    """

    threshold: float = 0.3
