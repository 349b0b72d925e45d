"""Tests that the origins of nodes are those that the sources give, and that asking changes nothing."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from bench.short_models import first_layers
from specengine import policies
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.recycling import Recycling
from specengine.engine import Engine
from specengine.records import Cycle
from tests.engine.engines import engine_of, tokenizer
from tests.examples import examples
from tests.toy import Tables, ToyDrafter, ToyTarget, policy_for, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [1, 2, 3, 1, 2, 3, 0, 1]


class Watched(Lookup):
    """Notes of each cycle, before it learns from it, which nodes its sources would propose."""

    def __init__(self, *sources: Any) -> None:
        super().__init__(*sources)
        self.seen: list[tuple[Cycle, list[bool], list[bool]]] = []

    def accept(self, cycle: Cycle) -> None:
        tree = cycle.grown
        assert tree is not None
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        copied = [
            self._copies_it(cycle, token, parent)
            for token, parent in zip(tokens[1:], parents[1:], strict=True)
        ]
        below = list(zip(tokens, parents, strict=True))[1:]
        recycled = [
            self.recycling is not None and token in self.recycling.table.row(tokens[parent])
            for token, parent in below
        ]
        self.seen.append((cycle, copied, recycled))
        super().accept(cycle)

    def _copies_it(self, cycle: Cycle, token: int, parent: int) -> bool:
        """Return whether `token` is among the copies below a node: its column alone would gain there."""
        tree, node, live = cycle.grown, torch.tensor([parent]), torch.ones(1, dtype=torch.int32)
        assert tree is not None
        self._copies.columns(torch.tensor([token]))
        self._token_ids = torch.empty(0)  # the columns are other ones in the next step
        plan = self._copies.plan((tree.tokens, tree.parents), node, live, 1)
        return plan is not None and 0 in plan[1]


# below a node that was not drafted from, they take another node's distribution
LENDING = "ddtree", "caddtree"


@examples(60)
@given(
    st.sampled_from([name for name in policies.names() if name != "plain"]),
    st.sampled_from(["copies", "recycled", "both"]),
    st.integers(0, 50),
    st.booleans(),
)
def test_origins_are_what_the_sources_say(
    name: str, sources: str, seed: int, sampled: bool
) -> None:
    tables, toy = (
        Tables(6, seed=seed, concentration=0.2),
        ToyDrafter(Tables(6, seed=seed + 1), columns=[0, 2, 4]),
    )
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": sampled,
        **({"seed": seed} if sampled else {}),
    }

    def engine() -> Engine:
        draft = (
            Watched(Recycling())
            if sources == "recycled"
            else Watched(toy, Recycling() if sources == "both" else None)
        )
        return Engine(ToyTarget(tables), draft, policy_for(name, seed))

    unasked = engine()
    expected = [piece.cycle for piece in unasked.stream(PROMPT, **options)]
    assert all(cycle.origins is None for cycle in expected)
    asked = engine()
    stream = asked.stream(PROMPT, **options)
    stream.answer.origins.wanted = True
    cycles = [piece.cycle for piece in stream]
    if name != "auto":  # which reads the clock
        assert [cycle.grown.tokens.tolist() for cycle in cycles] == [
            cycle.grown.tokens.tolist() for cycle in expected
        ]  # type: ignore[union-attr]
    assert [token for cycle in cycles for token in cycle.tokens] == [
        t for cycle in expected for t in cycle.tokens
    ]
    assert isinstance(asked.drafter, Watched)
    own = "recycled" if sources == "recycled" else "draft"
    for cycle, copied, recycled in asked.drafter.seen:
        assert cycle.origins is not None
        assert len(cycle.origins) == cycle.drafted + 1
        assert cycle.origins[0] is None
        for origin, of_copies, of_recycling in zip(
            cycle.origins[1:], copied, recycled, strict=True
        ):
            if name not in LENDING:
                assert (origin == "copied") == of_copies
            assert origin in ("copied", own, "recycled")
            assert origin != "recycled" or own == "recycled" or of_recycling or name in LENDING


@pytest.mark.parametrize(("draft", "origin"), [(NGram(3, 1), "copied"), (Recycling(), "recycled")])
def test_a_source_by_itself(draft: Any, origin: str) -> None:
    stream = Engine(ToyTarget(Tables(6, concentration=0.2)), draft, policy_for("eagle")).stream(
        PROMPT, max_new_tokens=24
    )
    stream.answer.origins.wanted = True
    found = {name for piece in stream for name in piece.cycle.origins or []}
    assert found == {None, origin}


def test_what_a_grammar_forces() -> None:
    pytest.importorskip("llguidance")
    text = "the only answer that there is"
    for draft, policy in (("small_model", "eagle"), ("ngram", "auto")):
        engine = engine_of(draft=draft, policy=policy, tokenizer=tokenizer())
        stream = engine.stream([7], grammar=f'start: "{text}"', max_new_tokens=64)
        stream.answer.origins.wanted = True
        cycles = [piece.cycle for piece in stream]
        assert sum(cycle.drafted for cycle in cycles) > 0
        for cycle in cycles:
            assert cycle.grown is not None
            # a row of one token is filled up with impossible ones
            likely = cycle.grown.log_probs.exp().tolist()[1:]
            origins = (cycle.origins or [])[1:]
            assert all(name == "forced" for name, p in zip(origins, likely, strict=True) if p > 0)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_trees_that_grow_in_graphs_say_nothing(options: dict[str, Any]) -> None:
    model = tiny()
    engine = Engine.from_pretrained(
        model, first_layers(model, 1), "eagle", graphs=True, lookup=False
    )
    stream = engine.stream([5, 6, 7, 8], max_new_tokens=12, **options)
    stream.answer.origins.wanted = True
    first, *others = (piece.cycle for piece in stream)
    assert len(first.tree) > 1
    assert others
    for cycle in others:
        assert not options or cycle.origins is not None
        assert set(cycle.origins or [None]) == {None}
