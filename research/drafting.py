"""One drafted tree, apart from a target and its cycles."""

from __future__ import annotations

import torch

from specengine.cycle import Draft, grow, result_of
from specengine.drafters import Drafter
from specengine.ops.tree import TokenTree
from specengine.policies import Plan, TreePolicy
from specengine.records import Seconds


def draft_tree(
    token: int,
    drafter: Drafter | None,
    policy: TreePolicy | None,
    seconds: Seconds,
    device: torch.device,
    plan: Plan | None = None,
) -> Draft:
    """Draft the tree under `token`; return the part to verify and the whole.

    Without a drafter, or while the policy rests, the tree is its root alone: plain decoding. Adds the time spent to
    `seconds`. plan: the policy's for this cycle, if it was asked already.
    """
    if drafter is None or policy is None or (plan := plan or policy.plan()).rests:
        alone = TokenTree.alone(token, device)
        return Draft(alone, alone)
    return result_of(grow(token, drafter, policy, seconds, device, plan))
