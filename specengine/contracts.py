"""What a policy and a drafter promise, and who broke it.

The first tree of an engine is looked at closely; later ones only where that takes no time that could be measured.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from specengine.drafters import Drafter, Wrapped
from specengine.errors import DrafterError, InputError, PolicyError, SpecEngineError, shown
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import CAPACITY, TokenTree
from specengine.policies import MOST_NODES, TreePolicy

TREE = "tree: "  # how the error of a tree begins, before it is said whose
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of logits
PASSED_ON = (MemoryError, torch.OutOfMemoryError)  # errors that tell of the machine

# ---- a policy


def require_parts(drafter: Drafter | None, policy: TreePolicy | None) -> None:
    """Raise PolicyError or DrafterError where a part does not state what an engine must know before it begins."""
    if policy is not None:
        _require_sizes(policy)
    if drafter is not None and not isinstance(getattr(drafter, "name", None), str):
        raise DrafterError(f"draft {type(drafter).__name__}.name: it has none, accepted a text")


def _require_sizes(policy: TreePolicy) -> None:
    """Raise PolicyError where the policy's capacity or budget is no number of nodes."""
    for name in ("capacity", "budget"):
        try:
            value = getattr(policy, name)
        except NotImplementedError:
            raise PolicyError(f"{_name(policy)}.{name}: it states none; accepted {_SIZES}") from None
        if not _is_size(value):
            raise PolicyError(f"{_name(policy)}.{name}: got {shown(value)}, accepted {_SIZES}")


_SIZES = f"how many nodes its trees can have, 1 to {MOST_NODES}"


def _is_size(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and 1 <= operator.index(value) <= MOST_NODES
    except TypeError:
        return False


def no_nodes(policy: TreePolicy, method: str, found: Any) -> PolicyError:
    """Return the error of a method that must return Nodes and returned something else."""
    ends = "" if method == "keep" else ", of which an empty one ends the tree"
    return PolicyError(f"{_name(policy)}: {method} returned {_kind(found)}, accepted Nodes{ends}")


def endless(policy: TreePolicy) -> PolicyError:
    """Return the error of a policy that has drafted from more nodes than its trees can have."""
    return PolicyError(
        f"{_name(policy)}: grow returned nodes that have been drafted from already, so the tree never ends; "
        "return new nodes, or an empty Nodes to stop"
    )


def twins(tokens: Sequence[int], parents: Sequence[int]) -> PolicyError:
    """Return the error of a tree in which two siblings carry the same token."""
    seen: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(parents, tokens, strict=True)):
        if edge in seen:
            break
        seen[edge] = node
    return PolicyError(
        f"{TREE}nodes {seen[edge]} and {node} below node {edge[0]} both carry token {edge[1]}; "
        "siblings must carry distinct tokens, as must the columns of a Step"
    )


def no_tree(policy: TreePolicy, tokens: Sequence[int], budget: int, vocab_size: int) -> PolicyError:
    """Return the error of a tree, about to be verified, with more nodes than stated or with a number that is no token.

    tokens: those of its nodes.
    """
    if len(tokens) > budget:
        return PolicyError(f"{_name(policy)}.budget: it states {budget} nodes, and keep returned {len(tokens)}")
    node = next(node for node, token in enumerate(tokens) if not 0 <= token < vocab_size)
    return PolicyError(
        f"{_name(policy)}: node {node} of its tree carries token {tokens[node]}, accepted 0 to {vocab_size - 1}"
    )


def require_kept(policy: TreePolicy, kept: Tensor | None, grown: TokenTree) -> None:
    """Raise PolicyError where `keep` returned nodes that the tree does not have."""
    if kept is not None and (fault := _fault_of_nodes(Nodes.of(kept), grown)) is not None:
        raise PolicyError(f"{_name(policy)}: keep returned {fault}")


def _fault_of_nodes(nodes: Any, tree: TokenTree) -> str | None:
    """Return what is wrong with nodes of this tree, in words; None for nothing."""
    if not isinstance(nodes, Nodes):
        return f"{_kind(nodes)}, accepted Nodes"
    ids, live = nodes
    if not (isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.dim() == 1):
        return f"ids of {_kind(ids)}, accepted int64 [nodes]"
    if not (isinstance(live, Tensor) and live.dtype == torch.int32 and live.shape == (1,)):
        return f"a count of {_kind(live)}, accepted int32 [1]"
    size = len(tree)
    beyond = [node for node in ids[: int(live)].tolist() if not 0 <= node < size]
    return f"node {beyond[0]}, which a tree of {size} nodes does not have" if beyond else None


# ---- a drafter


class Inspected(Wrapped):
    """A drafter whose distributions are checked before a policy sees them, and the frontiers that it is asked for.

    Raises DrafterError where a step is none, has another number of rows than the frontier, or holds NaN or what is no
    token; PolicyError where the frontier is none of the tree.
    """

    def __init__(self, inner: Drafter, policy: TreePolicy, vocab_size: int) -> None:
        super().__init__(inner)
        self._policy, self._vocab_size = policy, vocab_size

    def root(self, tree: TokenTree) -> Step:
        return self._checked(self.inner.root(tree), 1)

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        if (fault := _fault_of_nodes(frontier, tree)) is not None:
            raise PolicyError(f"{_name(self._policy)}: grow returned {fault}")
        return self._checked(self.inner.step(tree, frontier), frontier.ids.shape[0])

    def _checked(self, step: Step, rows: int) -> Step:
        if (fault := _fault_of_step(step, rows, self._vocab_size)) is not None:
            raise DrafterError(f"{_name(self.inner)}: step returned {fault}")
        return step


def _fault_of_step(step: Any, rows: int, vocab_size: int) -> str | None:
    """Return what is wrong with a step over so many nodes, in words; None for nothing."""
    if not isinstance(step, Step):
        return f"{_kind(step)}, accepted a Step"
    logits, ids = step.logits, step.token_ids
    if not (isinstance(logits, Tensor) and logits.dtype in DTYPES and logits.dim() == 2 and logits.shape[0] == rows):
        return f"logits of {_kind(logits)}, accepted float32, bfloat16 or float16 [{rows}, vocabulary]"
    if bool(torch.isnan(logits).any()):
        return "logits that are NaN"
    if step.normalized is False and bool((logits == torch.inf).any()):
        return "logits that are infinite"
    columns = logits.shape[1]
    if ids is None:
        return None if columns <= vocab_size else f"{columns} columns without token_ids, accepted up to {vocab_size}"
    if not (isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.shape == (columns,)):
        return f"token_ids of {_kind(ids)}, accepted int64 [{columns}], a token for each column"
    if columns and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        return f"token_ids from {int(ids.min())} to {int(ids.max())}, accepted 0 to {vocab_size - 1}"
    return None


# ---- who it was


def blamed(error: Exception) -> Exception:
    """Return the error that names the policy or the drafter that is behind this one; the same one where neither is.

    Errors of specengine that say enough, and those of a machine without memory, are returned as they are.
    """
    unsigned = type(error) is PolicyError and str(error).startswith((CAPACITY, TREE))
    known = isinstance(error, SpecEngineError) and type(error) is not InputError
    if isinstance(error, PASSED_ON) or (known and not unsigned):
        return error
    frames = list(_frames(error.__traceback__))
    calls = [(owner, frame) for frame in frames if (owner := _owner(frame)) is not None]
    if unsigned:
        drivers = [getattr(frame.f_locals.get("driver"), "policy", None) for frame in frames]  # of the engine's cycle
        policies = [policy for policy in (*drivers, *(owner for owner, _ in calls)) if isinstance(policy, TreePolicy)]
        return named(policies[-1], error) if policies else error
    if (fault := _handed_over(frames, error)) is not None:
        return fault
    if not calls or (isinstance(error, InputError) and str(error).startswith(("policy ", "draft"))):
        return error
    owner = calls[-1][0]
    method = next(_method(found, frame) for found, frame in calls if found is owner)
    kind = PolicyError if isinstance(owner, TreePolicy) else DrafterError
    what = str(error) if isinstance(error, InputError) else f"raised {type(error).__name__}: {error}"
    return kind(f"{_name(owner)}: {method}: {what}")


def named(policy: TreePolicy, error: Exception) -> PolicyError:
    """Return the error of a tree, a full one or one with twins, as that of the policy that grew it."""
    text = str(error)
    return PolicyError(f"{_name(policy)}.{text}" if text.startswith(CAPACITY) else f"{_name(policy)}: {text}")


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


_CALLERS = ("specengine.contracts", "specengine.cycle", "specengine.captured", "specengine.engine")


def _owner(frame: FrameType) -> TreePolicy | Drafter | None:
    """Return the policy or the drafter whose method runs in this frame; None where it is no method of one."""
    code = frame.f_code
    if not code.co_argcount or frame.f_globals.get("__name__") in _CALLERS:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    return first if isinstance(first, TreePolicy | Drafter) else None


def _method(owner: object, frame: FrameType) -> str:
    """Return the name by which the class of `owner` knows the function that runs in this frame."""
    names = (name for kind in type(owner).__mro__ for name, value in vars(kind).items() if _code(value) is frame.f_code)
    return next(names, frame.f_code.co_name)


def _code(value: Any) -> Any:
    return getattr(getattr(value, "fget", value), "__code__", None)


def _handed_over(frames: Sequence[FrameType], error: Exception) -> PolicyError | DrafterError | None:
    """Return the error of what one part of a cycle was given by another; None where nothing is wrong with that."""
    for frame in frames:
        held = frame.f_locals
        policy, tree = held.get("policy"), held.get("tree")
        if frame.f_globals.get("__name__") != "specengine.cycle" or not isinstance(policy, TreePolicy):
            continue
        if isinstance(tree, TokenTree) and (fault := _fault_of_nodes(held.get("frontier", _NONE), tree)) is not None:
            return PolicyError(f"{_name(policy)}: grow returned {fault}")
        if "kept" in held and isinstance(error, InputError):  # of the subtree
            return PolicyError(f"{_name(policy)}: keep returned {error}")
        if "found" in held and (fault := _fault_of_step(held["found"], held["frontier"].ids.shape[0], sys.maxsize)):
            return DrafterError(f"draft: its step returned {fault}")
    return None


_NONE = Nodes.of(torch.empty(0, dtype=torch.int64, device="cpu"))


def _name(owner: Any) -> str:
    """Return how messages call a policy or a draft: by its name for users, else by that of its class."""
    name = owner.__class__.__name__
    module = owner.__class__.__module__
    if isinstance(owner, TreePolicy):
        return f"policy {module.rpartition('.')[2] if module.startswith('specengine.policies.') else name}"
    given = getattr(owner, "name", None)
    return f"draft {given if isinstance(given, str) else name}"


def _kind(value: Any) -> str:
    """Return what a value is, in a word or two; of a tensor its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
