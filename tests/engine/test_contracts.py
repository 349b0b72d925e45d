"""Mistakes in a policy or a drafter of one's own: who made them, and what was wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import Engine, cycle
from specengine.drafters import Drafter
from specengine.errors import DrafterError, PolicyError
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.policies import Plan, TreePolicy
from specengine.records import Cycle
from tests.backend import target_of
from tests.hostile.engines import PROMPT, model, plainly

VOCABULARY = 260


class Bigram(Drafter):
    """Random distributions that depend on nothing."""

    name = "bigram"

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Any = None
    ) -> None: ...

    def step(self, tree: TokenTree, frontier: Nodes) -> Step:
        return Step(torch.randn(len(frontier.ids), VOCABULARY))

    def accept(self, cycle: Cycle) -> None: ...

    def reset(self) -> None: ...


@dataclass
class Gated(TreePolicy):
    """Two children below the likeliest node, three levels."""

    width: int = 2
    passes: int = 3
    capacity = 16

    def grow(self, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        children = step.add_best_children(tree, frontier, self.width)
        return Nodes(children.ids[:1], children.live.clamp(max=1)).where(tree.passes < self.passes)


def policy(**changed: Any) -> TreePolicy:
    """Gated with these attributes instead of its own."""
    return type("Gated", (Gated,), changed)()


def drafter(**changed: Any) -> Drafter:
    return type("Bigram", (Bigram,), changed)()


def run(shape: TreePolicy, draft: Drafter | None = None, tokens: int = 6) -> list[int]:
    return (
        Engine(target_of(model()), draft or Bigram(), shape)
        .generate(PROMPT, max_new_tokens=tokens)
        .token_ids
    )


def test_these_parts_answer_as_plain_decoding_does() -> None:
    assert run(policy()) == plainly(6)


# ---- a policy

NOTHING = torch.empty(0, dtype=torch.int64)
Grow = Callable[[Any, TokenTree, Nodes, Step], Any]


def after_growing(returned: Any) -> Grow:
    """A `grow` that hangs a child under each node and returns this."""

    def grow(self: Any, tree: TokenTree, frontier: Nodes, step: Step) -> Any:
        step.add_best_children(tree, frontier, 1)
        return returned

    return grow


def with_tokens(change: Callable[[Tensor], Tensor]) -> Grow:
    """A `grow` that hangs two children with changed tokens under each node."""

    def grow(self: Any, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        log_probs, tokens = step.best_children(2)
        tree.add_children(frontier, change(tokens), log_probs)
        return Nodes.of(NOTHING)

    return grow


def fails(self: Any, *given: Any) -> Any:
    raise ZeroDivisionError("division by zero")


ENDS = ", accepted Nodes, of which an empty one ends the tree"
WRONG_POLICIES: dict[str, tuple[dict[str, Any], str]] = {
    "no grow": (
        {"grow": TreePolicy.grow},
        ": grow: raised NotImplementedError: a policy must define grow",
    ),
    "grow returns nothing": ({"grow": after_growing(None)}, f": grow returned None{ENDS}"),
    "grow returns a list": ({"grow": after_growing([1])}, f": grow returned a list{ENDS}"),
    "grow returns a tensor": (
        {"grow": after_growing(torch.tensor([1]))},
        f": grow returned int64 [1]{ENDS}",
    ),
    "grow returns nodes to come": (
        {"grow": after_growing(Nodes.of(torch.tensor([7])))},
        ": grow returned node 7, which a tree of 2 nodes does not have",
    ),
    "grow returns numbers with a fraction": (
        {"grow": after_growing(Nodes.of(torch.tensor([1.0])))},
        ": grow returned ids of float32 [1], accepted int64 [nodes]",
    ),
    "grow returns a count of Python": (
        {"grow": after_growing(Nodes(torch.tensor([1]), 1))},  # type: ignore[arg-type]
        ": grow returned a count of a int, accepted int32 [1]",
    ),
    "grow returns its frontier": (
        {"grow": lambda self, tree, frontier, step: frontier},
        ": grow returned nodes that have been drafted from already, so the tree never ends; return new nodes, or an "
        "empty Nodes to stop",
    ),
    "grow fails": ({"grow": fails}, ": grow: raised ZeroDivisionError: division by zero"),
    "grow hangs what does not fit": (
        {
            "grow": lambda self, tree, frontier, step: tree.add_children(
                frontier, NOTHING[None], torch.zeros(1, 2)
            )
        },
        ": grow: log_probs: got float32 [1, 2]",
    ),
    "twins": (
        {"grow": with_tokens(lambda tokens: torch.full_like(tokens, 9))},
        ": tree: nodes 1 and 2 below node 0 both carry token 9; siblings must carry distinct tokens, as must",
    ),
    "tokens above the vocabulary": (
        {"grow": with_tokens(lambda tokens: torch.tensor([[5, VOCABULARY]]))},
        ": node 2 of its tree carries token 260, accepted 0 to 259",
    ),
    "tokens below 0": (
        {"grow": with_tokens(lambda tokens: torch.tensor([[-1, 5]]))},
        ": node 1 of its tree carries token -1, accepted 0 to 259",
    ),
    "room for too few": (
        {"capacity": 5, "width": 2},
        ".capacity: it states room for 5 nodes, the root included; the tree has 5 and cannot take 2 more",
    ),
    "a budget for too few": ({"budget": 2}, ".budget: it states 2 nodes, and keep returned 7"),
    "keep returns nothing": (
        {"keep": lambda self, tree: None},
        ": keep returned None, accepted Nodes",
    ),
    "keep leaves a parent out": (
        {"keep": lambda self, tree: Nodes.of(torch.tensor([0, 3, 4]))},
        ": keep returned nodes: must be ascending, start with the root and contain every node's parent",
    ),
    "keep leaves the root out": (
        {"keep": lambda self, tree: Nodes.of(torch.tensor([1]))},
        ": keep returned nodes: must be ascending, start with the root",
    ),
    "keep returns nodes that are not there": (
        {"keep": lambda self, tree: Nodes.of(torch.tensor([0, 12]))},
        ": keep returned node 12, which a tree of 7 nodes does not have",
    ),
    "grow returns nothing before the first pass": (
        {"plan": lambda self: Plan(patience=2), "grow": lambda self, tree, frontier, step: None},
        f": grow returned None{ENDS}",
    ),
    "learn fails": ({"learn": fails}, ": learn: raised ZeroDivisionError: division by zero"),
    "begin fails": ({"begin": fails}, ": begin: raised ZeroDivisionError: division by zero"),
    "keep fails": ({"keep": fails}, ": keep: raised ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("mistake", WRONG_POLICIES)
def test_a_policy_is_told_what_it_did(mistake: str) -> None:
    changed, message = WRONG_POLICIES[mistake]
    with pytest.raises(PolicyError, match="^" + re.escape(f"policy Gated{message}")):
        run(policy(**changed))


@pytest.mark.parametrize("capacity", [0, -3, None, 2.5, "many", True, 1 << 20])
def test_a_capacity_that_is_no_number_of_nodes_is_refused_at_once(capacity: Any) -> None:
    with pytest.raises(
        PolicyError,
        match=r"policy Gated\.capacity: got .*, accepted how many nodes its trees can have",
    ):
        run(policy(capacity=capacity))


def test_a_policy_without_a_capacity_is_refused_at_once() -> None:
    shape = type("Bare", (TreePolicy,), {"grow": Gated.grow})()
    with pytest.raises(PolicyError, match=r"policy Bare\.capacity: it states none"):
        Engine(target_of(model()), Bigram(), shape)


def test_a_policy_of_the_package_goes_by_the_name_that_users_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specengine.policies.talon import Talon

    monkeypatch.setattr(Talon, "grow", fails)
    with pytest.raises(PolicyError, match=r"^policy talon: grow: raised ZeroDivisionError"):
        run(Talon())


def test_a_mistake_in_a_later_tree_is_found_too() -> None:
    """The first tree is looked at closely; what ends the later ones is told as well."""

    def grow(self: Any, tree: TokenTree, frontier: Nodes, step: Step) -> Any:
        self.width += 1
        children = Gated.grow(self, tree, frontier, step)
        return None if self.width > 6 else children

    with pytest.raises(PolicyError, match="policy Gated: grow returned None"):
        run(policy(grow=grow, capacity=64))


def test_the_engine_can_be_used_again_with_another_policy() -> None:
    engine = Engine(target_of(model()), Bigram(), policy(grow=fails))
    with pytest.raises(PolicyError) as raised:
        engine.generate(PROMPT, max_new_tokens=6)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    engine.policy = policy()
    assert engine.generate(PROMPT, max_new_tokens=6).token_ids == plainly(6)


# ---- a drafter


def gives(made: Callable[[int], Any]) -> dict[str, Any]:
    """A drafter whose step over so many rows returns this."""
    return {"step": lambda self, tree, frontier: made(len(frontier.ids))}


def logits(rows: int, columns: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, columns)


WRONG_DRAFTERS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (gives(lambda rows: None), "step returned None, accepted a Step"),
    "bare logits": (gives(logits), "step returned float32 [1, 260], accepted a Step"),
    "a row without its axis": (
        gives(lambda rows: Step(logits(1)[0])),
        "step returned logits of float32 [260], accepted",
    ),
    "an axis too many": (
        gives(lambda rows: Step(logits(1)[None])),
        "step returned logits of float32 [1, 1, 260], accepted ",
    ),
    "a row too many": (
        gives(lambda rows: Step(logits(rows + 1))),
        "step returned logits of float32 [2, 260], accepted ",
    ),
    "no row": (
        gives(lambda rows: Step(logits(0))),
        "step returned logits of float32 [0, 260], accepted",
    ),
    "float64": (
        gives(lambda rows: Step(logits(rows).double())),
        "step returned logits of float64 [1, 260], accepted ",
    ),
    "integers": (
        gives(lambda rows: Step(logits(rows).long())),
        "step returned logits of int64 [1, 260], accepted",
    ),
    "an array": (
        gives(lambda rows: Step(logits(rows).numpy())),
        "step returned logits of a ndarray, accepted",
    ),  # type: ignore[arg-type]
    "NaN": (
        gives(lambda rows: Step(logits(rows) * float("nan"))),
        "step returned logits that are NaN",
    ),
    "infinity": (
        gives(lambda rows: Step(logits(rows) + float("inf"))),
        "step returned logits that are infinite",
    ),
    "columns that are no tokens": (
        gives(lambda rows: Step(logits(rows, 300))),
        "step returned 300 columns without token_ids, accepted up to 260",
    ),
    "tokens above the vocabulary": (
        gives(lambda rows: Step(logits(rows, 7), torch.arange(254, 261))),
        "step returned token_ids from 254 to 260, accepted 0 to 259",
    ),
    "tokens below 0": (
        gives(lambda rows: Step(logits(rows, 7), torch.arange(7) - 1)),
        "step returned token_ids from -1 to 5, accepted 0 to 259",
    ),
    "too few tokens": (
        gives(lambda rows: Step(logits(rows, 7), torch.arange(6))),
        "step returned token_ids of int64 [6], accepted int64 [7], a token for each column",
    ),
    "tokens in a list": (
        gives(lambda rows: Step(logits(rows, 2), [0, 1])),  # type: ignore[arg-type]
        "step returned token_ids of a list, accepted int64 [2], a token for each column",
    ),
    "step fails": ({"step": fails}, "raised ZeroDivisionError: division by zero"),
    "begin fails": ({"begin": fails}, "begin: raised ZeroDivisionError: division by zero"),
    "accept fails": ({"accept": fails}, "accept: raised ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("mistake", WRONG_DRAFTERS)
def test_a_drafter_is_told_what_it_did(mistake: str) -> None:
    changed, message = WRONG_DRAFTERS[mistake]
    with pytest.raises(DrafterError, match="^draft bigram: .*" + re.escape(message)):
        run(policy(), drafter(**changed))


def test_a_drafter_without_a_name_is_refused_at_once() -> None:
    with pytest.raises(DrafterError, match=r"^draft Bigram\.name: missing, accepted a string"):
        run(policy(), drafter(name=None))


def test_hidden_states_that_a_policy_reads_and_nobody_gives_are_named() -> None:
    def grow(self: Any, tree: TokenTree, frontier: Nodes, step: Step) -> Nodes:
        return Nodes.of(NOTHING[: int(step.hidden.sum())])  # type: ignore[union-attr]

    with pytest.raises(
        PolicyError, match="policy Gated: grow: raised AttributeError: 'NoneType' object has no"
    ):
        run(policy(grow=grow))


# ---- what is left alone


def test_errors_of_the_machine_pass_as_they_are() -> None:
    def full(self: Any, *given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run(policy(grow=full))


def test_an_interrupt_passes_as_it_is() -> None:
    def stopped(self: Any, *given: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(policy(), drafter(step=stopped))


def test_only_the_first_tree_is_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    original = cycle.Inspected.changed

    def count(self: Any, *given: Any) -> Step:
        looked.append(time.perf_counter())
        return original(self, *given)

    monkeypatch.setattr(cycle.Inspected, "changed", count)
    assert run(policy(), tokens=12) == plainly(12)
    assert len(looked) == 3, "as many as the first tree has passes"
