"""A draft whose prompt waits proposes what one does that has run it at once, whatever happens between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given
from torch import Tensor

from specengine import drafters
from specengine.drafters import Hints, RowDraft, another, innermost
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.engine.test_drafts_at_once import KINDS
from tests.examples import examples
from tests.models.native_engines import needs_extension

pytestmark = [needs_extension, pytest.mark.usefixtures("one_thread")]

NAMES = [
    "eagle 2, with temperatures",
    "eagle 3",
    "eagle 3, torch",
    "mtp glm4_moe",
    "mtp torch, latent keys",
    "small model",
    "small model, torch",
    "small model, recurrent",
]
token = st.integers(3, 90)
tokens = st.lists(token, min_size=1, max_size=12)
STEPS = st.one_of(
    st.tuples(st.just("rest"), st.lists(token, min_size=1, max_size=14)),
    st.tuples(st.just("draft"), tokens),
    st.tuples(st.just("turn"), st.tuples(st.integers(0, 30), tokens)),
    st.tuples(st.just("copy"), st.tuples(st.integers(0, 30), tokens)),
    st.tuples(st.just("reset"), tokens),
)


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RowDraft, RowDraft]]:
    with pytest.MonkeyPatch.context() as patch:
        engine = KINDS[request.param](tmp_path_factory.mktemp("model"), patch)
        draft = innermost(engine.drafter)
        assert isinstance(draft, RowDraft)
        yield draft, another(draft)


class Told:
    """A draft and the text that it was told; features of a position are a function of the text up to there."""

    def __init__(self, draft: RowDraft, waits: bool) -> None:
        self.draft, self.waits = draft, waits
        self.draft.reset()
        self.known: list[int] = []

    def features(self, text: list[int], first: int) -> Tensor | None:
        buffer: Any = self.draft._features
        if buffer is None or first == len(text):
            return None
        rows = []
        for end in range(first + 1, len(text) + 1):
            random = torch.Generator().manual_seed(hash(tuple(text[:end])) % 2**32)
            rows.append(torch.randn(buffer.shape[1], generator=random))
        return torch.stack(rows).to(buffer.dtype)

    def begin(self, prompt: list[int]) -> None:
        self.draft.begin(
            prompt, self.features(prompt, self.draft.cached(prompt)), Hints(waits=self.waits)
        )
        self.known = list(prompt)

    def commit(self, root: int, following: int) -> None:
        self.known = [*self.known, root]
        features = self.features(self.known, len(self.known) - 1)
        tree = TokenTree.alone(root, torch.device("cpu"))
        self.draft.accept(Cycle(tree, [0], [following], Seconds(), features=features))

    def copied(self, count: int) -> Told:
        made = Told(another(self.draft), self.waits)
        made.draft.copy_from(self.draft, min(count, len(self.known)))
        return made

    def logits(self, root: int) -> Tensor:
        return self.draft.root(TokenTree.root(root, 6)).logits.clone()


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(prompt=tokens, steps=st.lists(STEPS, max_size=7), last=token)
def test_what_waits_is_drafted_from_as_if_it_had_been_run(
    pair: tuple[RowDraft, RowDraft], prompt: list[int], steps: list[Any], last: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(drafters, "MAX_WAITING", 20)
        both = [Told(draft, waits) for draft, waits in zip(pair, (False, True), strict=True)]

        def alike(root: int) -> None:
            at_once, waited = (told.logits(root) for told in both)
            torch.testing.assert_close(waited, at_once, rtol=1e-3, atol=1e-3)
            assert not any(told.draft._late for told in both)

        def begin(prompt: list[int]) -> None:
            for told in both:
                told.begin(prompt)
            assert both[1].draft.cache.length < max(len(prompt), 1)
            assert not both[0].draft._late

        begin(prompt)
        for step, given in steps:
            known = both[0].known
            if step == "rest":
                for root, following in zip(given, [*given[1:], last], strict=True):
                    for told in both:
                        told.commit(root, following)
            elif step == "draft":
                alike(given[0])
                for told in both:
                    told.commit(given[0], given[-1])
            elif step == "reset":
                for told in both:
                    told.draft.reset()
                begin(given)
            else:
                if step == "copy":
                    both = [told.copied(given[0]) for told in both]
                begin([*known[: given[0]], *given[1]])
        alike(last)


def test_a_draft_that_waits_runs_nothing_and_holds_little(
    pair: tuple[RowDraft, RowDraft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt and answer wait until there are MAX_WAITING rows, or until a tree is asked for."""
    ran = list[int]()
    told = Told(pair[1], waits=True)
    extend = told.draft._extend
    monkeypatch.setattr(drafters, "MAX_WAITING", 60)
    monkeypatch.setattr(
        told.draft,
        "_extend",
        lambda tokens, features: (ran.append(len(tokens)), extend(tokens, features)),
    )
    with torch.inference_mode():
        told.begin(list(range(5, 25)))
        for root in range(30, 60):
            told.commit(root, root + 1)
        assert ran == []
        for root in range(60, 200):
            told.commit(root % 90 + 3, (root + 1) % 90 + 3)
        assert sum(ran) >= 20
        told.logits(7)
        assert sum(ran) + int(told.draft.taken) <= 190
        assert told.draft.cache.length >= 189
