"""Errors that name the policy or the drafter that broke its contract.

The contracts stand beside the interfaces. The first tree of an engine is checked closely (cycle.Inspected); later ones
only where that costs no measurable time.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import torch

from specengine import drafters, policies
from specengine.drafters import Drafter
from specengine.errors import DrafterError, InputError, PolicyError, SpecEngineError
from specengine.ops.tree import CAPACITY, TokenTree
from specengine.policies import TreePolicy

PASSED_ON = (MemoryError, torch.OutOfMemoryError)  # errors of the machine


def blamed(error: BaseException) -> BaseException:
    """Return the error that names the policy or the drafter behind this one, or the same one if neither is.

    Errors of specengine that say enough, those of a machine without memory, and interrupts are returned as they are.
    """
    unsigned = type(error) is PolicyError and str(error).startswith((CAPACITY, policies.TREE))
    known = isinstance(error, SpecEngineError) and type(error) is not InputError
    if not isinstance(error, Exception) or isinstance(error, PASSED_ON) or (known and not unsigned):
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [(owner, frame) for frame in frames if (owner := _owner(frame)) is not None]
    if unsigned:
        drivers = [
            getattr(frame.f_locals.get("driver"), "policy", None) for frame in frames
        ]  # of the engine's cycle
        seen = [
            policy
            for policy in (*drivers, *(owner for owner, _ in calls))
            if isinstance(policy, TreePolicy)
        ]
        return policies.named(seen[-1], error) if seen else error
    if (fault := _handed_over(frames, error)) is not None:
        return fault
    if not calls or (isinstance(error, InputError) and str(error).startswith(("policy ", "draft"))):
        return error
    owner = calls[-1][0]
    method = next(_method(found, frame) for found, frame in calls if found is owner)
    kind = PolicyError if isinstance(owner, TreePolicy) else DrafterError
    what = (
        str(error) if isinstance(error, InputError) else f"raised {type(error).__name__}: {error}"
    )
    name = policies.name_of(owner) if isinstance(owner, TreePolicy) else drafters.name_of(owner)
    return kind(f"{name}: {method}: {what}")


_CALLERS = (
    "specengine.contracts",
    "specengine.cycle",
    "specengine.captured",
    "specengine.engine.drivers",
)


def _owner(frame: FrameType) -> TreePolicy | Drafter | None:
    """Return the policy or the drafter whose method runs in this frame; None in other functions."""
    code = frame.f_code
    if not code.co_argcount or frame.f_globals.get("__name__") in _CALLERS:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    return first if isinstance(first, TreePolicy | Drafter) else None


def _method(owner: object, frame: FrameType) -> str:
    """Return the name by which the class of `owner` knows the function that runs in this frame."""
    members = (member for kind in type(owner).__mro__ for member in vars(kind).items())
    code = frame.f_code
    names = (
        name
        for name, value in members
        if getattr(getattr(value, "fget", value), "__code__", None) is code
    )
    return next(names, code.co_name)


def _handed_over(
    frames: Sequence[FrameType], error: Exception
) -> PolicyError | DrafterError | None:
    """Return the error of a value that one part of a cycle handed to another, or None."""
    for frame in frames:
        held = frame.f_locals
        policy, tree = held.get("policy"), held.get("tree")
        if frame.f_globals.get("__name__") != "specengine.cycle" or not isinstance(
            policy, TreePolicy
        ):
            continue
        if (
            isinstance(tree, TokenTree)
            and "frontier" in held
            and (fault := policies.fault_of_nodes(held["frontier"], tree)) is not None
        ):
            return PolicyError(f"{policies.name_of(policy)}: grow returned {fault}")
        if "kept" in held and isinstance(error, InputError):  # of the subtree
            return PolicyError(f"{policies.name_of(policy)}: keep returned {error}")
        if "found" in held and (
            fault := drafters.fault_of_step(
                held["found"], held["frontier"].ids.shape[0], sys.maxsize
            )
        ):
            return DrafterError(f"draft: its step returned {fault}")
    return None
