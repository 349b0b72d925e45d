"""Tree policies: one file = one TreePolicy; the file's name is its name, its fields are its options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from specengine import errors, registry
from specengine.costs import Costs
from specengine.errors import InputError, did_you_mean, shown
from specengine.ops import Nodes
from specengine.ops.tree import TokenTree
from specengine.records import Cycle

if TYPE_CHECKING:
    from specengine.drafters import Drafter
    from specengine.ops.select import Step


class TreePolicy:
    """Shapes the draft tree. A subclass is a dataclass whose fields are its options.

    `capacity` is the maximum number of nodes that `grow` appends, `budget` the maximum that `keep` returns; both count
    the root. A policy that can be captured also states `rows`, the maximum number of nodes drafted from in one pass,
    and `passes`, the maximum number of draft passes. `presets` are named options: `make("eagle/talon-table1")`.

    Rules work on tensors of any width, and counts are tensors too. The eager driver passes only live nodes; the
    captured driver records a rule once and replays it over padding. So a rule selects with `Tensor.where`, updates
    persistent tensors in place, and reads tensors on the host only on a CPU.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    ends_early: ClassVar[bool] = True  # whether a tree may end before its last pass
    reads_hidden: ClassVar[bool] = False  # whether it reads Step.hidden
    reads_costs: bool = False  # whether the engine's measured costs are asked for
    patience: ClassVar[int] = 0  # so many cycles in a row may go without a draft pass
    plain_reason: ClassVar[str] = "nothing was proposed"  # where a tree is its root alone
    plain_seconds: float | None = None  # what a plain cycle takes now, where that has been measured
    rests: bool = False  # whether the next cycle, of an eager driver, is plain: it is not asked then, but observes

    @property
    def capacity(self) -> int:
        raise NotImplementedError("a policy states its capacity")

    @property
    def budget(self) -> int:
        return self.capacity

    @property
    def rows(self) -> int:
        raise NotImplementedError("a policy states its rows to be captured")

    @property
    def passes(self) -> int:
        raise NotImplementedError("a policy states its passes to be captured")

    def price(self, costs: Costs) -> None:
        """Take the measured costs of this engine's cycles. Called before every generation if `reads_costs` is set."""

    def first(self, tree: TokenTree, drafter: Drafter) -> Nodes:
        """Return the first frontier: the root, or nothing to skip drafting.

        After `patience` skipped cycles in a row it must be the root. Continuations that the drafter has `free` may be
        appended below a root that is not drafted from.
        """
        return tree.root_alone()

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        """Append children to the frontier; return the nodes to draft from next, or none to stop.

        frontier: the nodes that `step` holds distributions for, in its order. `tree.passes` counts the passes so far.
        """
        raise NotImplementedError("a policy grows the tree")

    def last(self, tree: TokenTree, drafter: Drafter) -> None:
        """Append continuations that the drafter has `free`. Called after the last draft pass of an eager driver."""

    def keep(self, tree: TokenTree) -> Nodes:
        """Return the nodes to verify: ascending, the root included, closed under parent. By default all of them."""
        return Nodes(torch.arange(tree.capacity, device=tree.device, dtype=torch.int64), tree.size)

    def begin(self, tokens: int, sampled: bool = False) -> None:
        """Prepare for a generation.

        tokens: length of the prompt; sampled: whether the target draws its tokens, at a temperature above 0.
        """

    def learn(self, tree: TokenTree, path: Nodes, chosen: Tensor) -> None:
        """Learn from the target's choices in a grown tree. Runs under either driver.

        path: the accepted nodes, the root first; chosen: int64 [width], the target's token after each of them, which
        need not be a child's.
        """

    def state_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors on `device` that `first` and `learn` change and that outlive a cycle."""
        return ()

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle, on the host. For policies with a history."""

    @classmethod
    def learns(cls) -> bool:
        """Return whether the policy learns where trees grow."""
        return cls.learn is not TreePolicy.learn

    @classmethod
    def has_history(cls) -> bool:
        """Return whether a tree depends on the outcomes of earlier cycles."""
        return cls.observe is not TreePolicy.observe


MOST_NODES = 1 << 14  # of a tree, as it is grown: its table of ancestors takes the square of that in bits


def names() -> list[str]:
    """All policies, and `plain` for decoding without a draft."""
    return [*registry.names(sys.modules[__name__]), "plain"]


def presets() -> dict[str, dict[str, Any]]:
    """The options of all named settings, by `policy/preset`."""
    classes = {name: find(name) for name in registry.names(sys.modules[__name__])}
    return {f"{name}/{key}": dict(options) for name, cls in classes.items() for key, options in cls.presets.items()}


def find(name: str) -> type[TreePolicy]:
    """The class of the policy `name`; InputError for an unknown one."""
    return registry.find(sys.modules[__name__], TreePolicy, name, "policy")


def of(policy: str | TreePolicy, options: Mapping[str, Any]) -> TreePolicy:
    """The policy of this name and with these options, as `make`, or the one that is given, which takes none."""
    if isinstance(policy, str):
        return make(policy, **options)
    if not isinstance(policy, TreePolicy):
        raise InputError(f"policy: got {shown(policy)}, accepted {', '.join(names())} or a TreePolicy")
    if options:
        raise InputError("policy_options: they need a policy given by name")
    return policy


def make(name: str, /, **options: Any) -> TreePolicy:
    """The policy `name`, or `name/preset`, with these options; unknown names, options and values raise InputError."""
    name, _, preset = name.partition("/")
    cls = find(name)
    if preset and preset not in cls.presets:
        raise InputError(
            f"policy {name}: unknown preset {shown(preset)}, known are {', '.join(cls.presets) or '(none)'}"
            f"{did_you_mean(preset, cls.presets)}"
        )
    made = registry.build(cls, {**cls.presets.get(preset, {}), **options}, f"policy {name}")
    if made.capacity > MOST_NODES:
        raise InputError(f"policy {name}: its trees could have {made.capacity} nodes, accepted up to {MOST_NODES}")
    return made


def require(policy: str, field: str, value: Any, accepted: str, holds: bool) -> None:
    """Raise InputError for an option outside its range."""
    errors.require(f"policy {policy}.{field}", value, accepted, holds)


T = TypeVar("T")


class PerDevice(Generic[T]):
    """Tensors or a network, with a copy for each device that they were asked for on.

    A captured cycle goes on reading the memory of its device while another one runs on the host, so nothing moves.
    make: gives them on a device, on first use there.
    """

    def __init__(self, make: Callable[[torch.device], T]) -> None:
        self._make, self._copies = make, dict[torch.device, T]()

    def on(self, device: torch.device) -> T:
        if device not in self._copies:
            self._copies[device] = self._make(device)
        return self._copies[device]

    def copies(self) -> Iterable[T]:
        """All that were made, for those who change them in place."""
        return self._copies.values()
