"""Rules that shape the draft tree, one file each. The file's name is the policy's name, its fields are its options."""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from specengine import errors, registry
from specengine.errors import (
    PolicyError,
    did_you_mean,
    kind_of,
    require_input as require_input,
    require_or,
    shown,
)
from specengine.ops import Flag, Nodes, Step, TokenTree, is_down, number

if TYPE_CHECKING:
    from specengine.costs import PassCosts
    from specengine.records import Outcome


class Plan(NamedTuple):
    """Settings of a policy for the next cycle.

    patience       cycles in a row that may skip drafting; above 0 the policy is asked before the first draft pass
    rests          decode plainly without asking the policy; it still learns. Captured drivers read it on the host
    reason         why a tree may be its root alone, for the statistics
    plain_seconds  duration of a plain cycle now, if it was measured
    reads_costs    whether `begin` reads the measured costs of this engine
    learns         whether the policy wants this cycle's outcome
    times          whether a policy that learns inside a graph wants the record of each cycle as well, for its times
    """

    patience: int = 0
    rests: bool = False
    reason: str = "nothing was proposed"
    plain_seconds: float | None = None
    reads_costs: bool = False
    learns: bool = True
    times: bool = False


DRAFT = Plan()


class TreePolicy:
    """Shapes the draft tree. A subclass is a dataclass whose fields are its options.

    `capacity` is the maximum number of nodes that `grow` appends, `budget` the maximum that `keep` returns; both count
    the root. A policy that can be captured also states `rows`, the maximum number of nodes drafted from in one pass (by
    default its option `width`), and `passes`, the maximum number of draft passes. `presets` are named options:
    `make("eagle/talon-table1")`.

    Rules work on tensors of any width, and counts are tensors too. The eager driver passes only live nodes; the
    captured driver records a rule once and replays it over padding. So a rule selects with `Tensor.where`, updates
    persistent tensors in place, and reads tensors on the host only on a CPU.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    ends_early: ClassVar[bool] = True  # whether a tree may end before its last pass

    @property
    def capacity(self) -> int:
        raise NotImplementedError("a policy must state its capacity")

    @property
    def budget(self) -> int:
        return self.capacity

    @property
    def rows(self) -> int:
        return int(getattr(self, "width", 0))

    @property
    def passes(self) -> int:
        raise NotImplementedError("a policy must state its passes to be captured")

    def plan(self) -> Plan:
        """Return how to run the next cycle. By default it drafts."""
        return DRAFT

    def begin(
        self, tokens: int, sampled: bool = False, costs: "Callable[[], PassCosts] | None" = None
    ) -> None:
        """Prepare for a generation.

        tokens: length of the prompt; sampled: whether the target draws its tokens, at a temperature above 0; costs:
        returns the measured costs of this engine's cycles, which may take seconds the first time.
        """

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        """Append children to the frontier; return the nodes to draft from next, or none to stop.

        frontier: the nodes that `step` holds distributions for, in its order. `tree.passes` counts the passes so far.
        A policy with a `patience` is called before the first pass too, with an empty frontier and a step of no rows.
        Then it returns the root, or nothing to skip drafting; after `patience` skipped cycles in a row the root.
        """
        raise NotImplementedError("a policy must define grow")

    def keep(self, tree: TokenTree) -> Nodes:
        """Return the nodes to verify: ascending, the root included, closed under parent. By default all of them.

        Continuations that need no draft pass may be appended first, see `TokenTree.free`.
        """
        return Nodes(torch.arange(tree.capacity, device=tree.device, dtype=torch.int64), tree.size)

    def learn(self, outcome: "Outcome") -> None:
        """Learn from the target's choices in a grown tree. Called once per cycle.

        A captured driver calls it inside a graph if the policy has a state on the device, else on the host. With
        `Plan.times` it then calls it once more on the host, with the record of a cycle that has been learnt from.
        """

    def state_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors on `device` that `grow` and `learn` change and that outlive a cycle."""
        return ()


# of a tree, as it is grown: its table of ancestors takes the square of that in bits
MAX_NODES = 1 << 14


def names() -> list[str]:
    """Return the names of the policies that ship, and `plain` for decoding without a draft."""
    return [*registry.names(sys.modules[__name__]), "plain"]


def presets() -> dict[str, dict[str, Any]]:
    """Return the options of all presets by `policy/preset`."""
    return {
        f"{name}/{key}": dict(options)
        for name in registry.names(sys.modules[__name__])
        for key, options in find(name).presets.items()
    }


def find(name: str) -> type[TreePolicy]:
    """Return the class of a policy: one that ships, a plug-in's, or FILE.py:CLASS. InputError for an unknown name."""
    return registry.find(sys.modules[__name__], TreePolicy, name, "policy")


def of(policy: str | TreePolicy, options: Mapping[str, Any]) -> TreePolicy:
    """Return a policy: by name and options as `make` does, or the given object, which takes no options."""
    if isinstance(policy, str):
        return make(policy, **options)
    require_input(
        f"policy: got {shown(policy)}, accepted {', '.join(names())} or a TreePolicy",
        isinstance(policy, TreePolicy),
    )
    require_input("policy_options: they need a policy given by name", not options)
    return policy


def make(name: str, /, **options: Any) -> TreePolicy:
    """Make the policy `name`, or `name/preset`. Raises InputError for unknown names, options and values.

    name: as `find` takes it. The code of a file or a plug-in is run.
    """
    name, preset = split_preset(name)
    cls = find(name)
    require_input(
        f"policy {name}: unknown preset {shown(preset)}, known are {', '.join(cls.presets) or '(none)'}"
        f"{did_you_mean(preset, cls.presets)}",
        not preset or preset in cls.presets,
    )
    policy = registry.build(cls, {**cls.presets.get(preset, {}), **options}, f"policy {name}")
    require_input(
        f"policy {name}: its trees could have {policy.capacity} nodes, accepted up to {MAX_NODES}",
        policy.capacity <= MAX_NODES,
    )
    return policy


def split_preset(name: str) -> tuple[str, str]:
    """Return NAME[/PRESET] as two; the folders in FILE.py[:CLASS[/PRESET]] are no presets."""
    file, colon, rest = name.rpartition(":") if registry.is_file(name) else ("", "", name)
    name, _, preset = (rest, "", "") if rest.endswith(".py") else rest.partition("/")
    return file + colon + name, preset


def require(policy: str, field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError for an option outside its range."""
    errors.require(f"policy {policy}.{field}", value, accepted, holds)


def require_each(policy: str, *checks: tuple[str, Any, str, bool]) -> None:
    """Raise InputError for the first option outside its range; checks: field, value, accepted, whether it holds."""
    for check in checks:
        require(policy, *check)


def require_minimum(policy: str, options: Any, **minimums: float) -> None:
    """Raise InputError for an option of a policy below its minimum."""
    errors.require_minimum(options, f"policy {policy}.", **minimums)


def require_minimum_or_none(policy: str, options: Any, *fields: str) -> None:
    """Raise InputError for an option of a policy that is below 1 and not none."""
    values = ((field, getattr(options, field)) for field in fields)
    require_each(
        policy,
        *((field, n, "1 or more, or none", n is None or n >= 1) for field, n in values),
    )


T = TypeVar("T")


class PerDevice(dict[torch.device, T]):
    """Tensors or a network by device, each copy made by `make` on first use.

    A captured cycle goes on reading the memory of its device while another one runs on the host, so nothing moves.
    """

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, device: torch.device) -> T:
        return self.setdefault(device, self._make(device))


# ---- the contract of a policy, and errors of policies that break it


def name_of(policy: TreePolicy) -> str:
    """Return the name of a policy in messages: the one for users, else that of its class."""
    cls = type(policy)
    shipped = cls.__module__.startswith("specengine.policies.")
    return f"policy {cls.__module__.rpartition('.')[2] if shipped else cls.__name__}"


def require_sizes(policy: TreePolicy) -> None:
    """Raise PolicyError where the policy's capacity or budget is no number of nodes."""
    for name in ("capacity", "budget"):
        try:
            value = getattr(policy, name)
            fits = not isinstance(value, bool) and 1 <= operator.index(value) <= MAX_NODES
        except NotImplementedError:
            raise PolicyError(
                f"{name_of(policy)}.{name}: it states none; accepted {_SIZES}"
            ) from None
        except TypeError:
            fits = False
        require_or(
            PolicyError, f"{name_of(policy)}.{name}: got {shown(value)}, accepted {_SIZES}", fits
        )


_SIZES = f"how many nodes its trees can have, 1 to {MAX_NODES}"


def no_nodes(policy: TreePolicy, method: str, returned: Any) -> PolicyError:
    """Return the error of a method that must return Nodes and returned something else."""
    ends = "" if method == "keep" else ", of which an empty one ends the tree"
    return PolicyError(
        f"{name_of(policy)}: {method} returned {kind_of(returned)}, accepted Nodes{ends}"
    )


def twins(policy: TreePolicy | None, tokens: Sequence[int], parents: Sequence[int]) -> PolicyError:
    """Return the error of a tree in which two siblings carry the same token."""
    edges = list(zip(parents, tokens, strict=True))
    node, edge = next(item for item in enumerate(edges) if item[1] in edges[: item[0]])
    name = "" if policy is None else f"{name_of(policy)}: "
    return PolicyError(
        f"{name}tree: nodes {edges.index(edge)} and {node} below node {edge[0]} both carry token {edge[1]}; "
        "siblings must carry distinct tokens, as must the columns of a Step"
    )


def no_tree(policy: TreePolicy, tokens: Sequence[int], budget: int, vocab_size: int) -> PolicyError:
    """Return the error of a tree, about to be verified, with more nodes than stated or with a number that is no token.

    tokens: those of its nodes.
    """
    if len(tokens) > budget:
        return PolicyError(
            f"{name_of(policy)}.budget: it states {budget} nodes, and keep returned {len(tokens)}"
        )
    node = next(node for node, token in enumerate(tokens) if not 0 <= token < vocab_size)
    return PolicyError(
        f"{name_of(policy)}: node {node} of its tree carries token {tokens[node]}, accepted 0 to {vocab_size - 1}"
    )


def require_nodes(policy: TreePolicy, method: str, nodes: Any, tree: TokenTree) -> None:
    """Raise PolicyError where a method returned nodes that the tree does not have."""

    def check(fault: str, holds: bool) -> None:
        require_or(PolicyError, f"{name_of(policy)}: {method} returned {fault}", holds)

    check(f"{kind_of(nodes)}, accepted Nodes", isinstance(nodes, Nodes))
    ids, live = nodes
    check(
        f"ids of {kind_of(ids)}, accepted int64 [nodes]",
        isinstance(ids, Tensor) and ids.dtype == torch.int64 and ids.dim() == 1,
    )
    check(
        f"a count of {kind_of(live)}, accepted int32 [1]",
        isinstance(live, Tensor) and live.dtype == torch.int32 and live.shape == (1,),
    )
    size = len(tree)
    beyond = [node for node in ids[: int(live)].tolist() if not 0 <= node < size]
    listed = ", ".join(map(str, beyond[:1]))
    check(f"node {listed}, which a tree of {size} nodes does not have", not beyond)


def named(policy: TreePolicy, error: Exception) -> PolicyError:
    """Return the error of a full tree as that of the policy that grew it."""
    return PolicyError(f"{name_of(policy)}.{error}")


# ---- the beam that the depth rules stop


@dataclass
class Beam(TreePolicy):
    """EAGLE-2's beam, which a subclass may end early; with a width of 1 it is a chain.

    width       children per node and nodes drafted from per level
    expansions  levels grown after the first, at most
    budget      nodes verified, the root included
    """

    width: int = 10
    expansions: int = 12
    budget: int = 61

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"width": 1, "expansions": 11, "budget": 13},
        "cpu": {"width": 4, "expansions": 4, "budget": 12},
    }

    def __post_init__(self) -> None:
        require_minimum(type(self).__name__.lower(), self, width=1, expansions=0, budget=1)

    @property
    def capacity(self) -> int:
        return 1 + self.width + self.expansions * self.width**2

    @property
    def passes(self) -> int:
        return self.expansions + 1

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        nodes = step.add_best_children(tree, frontier, self.width)
        goes_on = (number(tree.passes) <= self.expansions) & (number(nodes.live) > 0)
        if is_down(goes_on):
            return nodes.where(goes_on)
        beam = tree.best(nodes, self.width)
        return beam.where(goes_on).unless(self.stops(tree, frontier, step, beam))

    def stops(self, tree: TokenTree, frontier: Nodes, step: Step, beam: Nodes) -> Flag:
        """Return whether to stop before drafting from `beam`, the best nodes of the last level: a bool, or bool [1].

        frontier: the nodes that `step` holds distributions for; beam: their best children, one at least where anything
        was proposed. `tree.passes - 1` expansions are complete.
        """
        return False

    def keep(self, tree: TokenTree) -> Nodes:
        return tree.best_of_all(self.budget)
