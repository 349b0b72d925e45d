"""DyJoint: a chain that ends where its whole path is improbable."""

from dataclasses import dataclass

from specengine.policies.baselines.dymax import DyMax


@dataclass
class DyJoint(DyMax):
    """Greedy draft tokens while their joint probability is `threshold` or more; the first is always proposed.

    Source: C2T, Table 7.
    """

    threshold: float = 0.08

    judges_path = True
