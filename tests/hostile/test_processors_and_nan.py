"""Processors that fail and logits that are not finite: named, kept out of answers, and the engine usable afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers import LogitsProcessor

from specengine import Engine
from specengine.drafters import NOT_FINITE
from specengine.drafters.lookup import Lookup
from specengine.drafters.small_model import SmallModel
from specengine.errors import NumericalError, ProcessorError
from tests.backend import target_of
from tests.hostile.engines import PROMPT, check_usable, engine_of, model, plainly, stream_into
from tests.toy import POLICIES, hooked, near_copy, policy_for

pytestmark = pytest.mark.usefixtures("one_thread")


class Returns(LogitsProcessor):
    """Gives what `make` makes of the scores, from the third new token on."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return self.make(scores) if input_ids.shape[1] > len(PROMPT) + 2 else scores


def _raises(scores: Tensor) -> Tensor:
    raise KeyError("the table")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_raises, "logits processor Returns raised KeyError: 'the table'"),
        (
            lambda scores: scores * float("nan"),
            "logits processor Returns returned NaN or infinity at position 19",
        ),
        (
            lambda scores: scores + float("inf"),
            "logits processor Returns returned NaN or infinity at position 19",
        ),
        (
            lambda scores: scores - float("inf"),
            "logits processor Returns left no token at position 19",
        ),
        (
            lambda scores: scores[:, :5],
            r"logits processor Returns returned shape \(1, 5\), not shape \(1, 260\)",
        ),
        (
            lambda scores: scores[0],
            r"logits processor Returns returned shape \(260,\), not shape \(1, 260\)",
        ),
    ],
)
@pytest.mark.parametrize("seed", [None, 3])
def test_failing_processors_are_named(
    make: Callable[[Tensor], Any], message: str, seed: int | None
) -> None:
    engine = engine_of()
    options = {} if seed is None else {"seed": seed, "do_sample": True}
    with pytest.raises(ProcessorError, match=message):
        engine.generate(PROMPT, logits_processor=[Returns(make)], max_new_tokens=20, **options)
    assert engine.target.tokens == []
    check_usable(engine)


def test_a_processor_that_returns_no_tensor_is_named() -> None:
    engine = engine_of()
    with pytest.raises(ProcessorError, match="logits processor Returns returned NoneType"):
        engine.generate(PROMPT, logits_processor=[Returns(lambda scores: None)], max_new_tokens=20)
    check_usable(engine)


def test_a_failing_stopping_criterion_leaves_the_engine_usable() -> None:
    engine = engine_of()

    def fails(input_ids: Tensor, scores: Any) -> bool:
        raise RuntimeError("no more patience")

    with pytest.raises(RuntimeError, match="no more patience"):
        engine.generate(PROMPT, stopping_criteria=[fails])
    check_usable(engine)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [None, 5])
def test_nan_on_tree_nodes_never_changes_the_answer(policy: str, seed: int | None) -> None:
    """Rows below the root are NaN, so no node may be entered; the root's row is that of plain decoding."""
    options = {} if seed is None else {"seed": seed, "do_sample": True}
    expected, engine = plainly(16, **options), engine_of(policy)

    def spoil(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[:, 1:] = float("nan")
        return logits

    with hooked(engine.target.model.lm_head, spoil):
        result = engine.generate(PROMPT, max_new_tokens=16, **options)
    assert result.token_ids == expected
    assert result.stats.num_draft_tokens > 0 == result.stats.num_accepted_draft_tokens
    check_usable(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 5}, {"repetition_penalty": 1.2}], ids=str
)
def test_tokens_whose_logits_are_not_finite_are_never_chosen(
    value: float, options: dict[str, Any]
) -> None:
    favourites = plainly(16, **options)

    def spoil(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., favourites] = value
        return logits

    with hooked(model().lm_head, spoil):
        expected = plainly(16, **options)
        assert engine_of().generate(PROMPT, max_new_tokens=16, **options).token_ids == expected
    assert not set(expected) & set(favourites)


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 5}, {"repetition_penalty": 1.2}], ids=str
)
def test_nan_on_the_root_is_an_error_with_a_position(options: dict[str, Any]) -> None:
    engine = engine_of()
    calls = 0

    def spoil(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += bool(seen)  # a hook that spoils all is found when it is hung on
        return logits * float("nan") if calls > 2 else logits

    seen: list[int] = []
    with (
        hooked(engine.target.model.lm_head, spoil),
        pytest.raises(NumericalError, match="at position") as raised,
    ):
        stream_into(seen, engine, **options)
    assert f"position {len(PROMPT) + len(seen)} " in str(raised.value)
    assert seen == plainly(40, **options)[: len(seen)] != []
    check_usable(engine)


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_draft_whose_logits_are_not_finite_is_noted(value: float, lookup: bool) -> None:
    draft = SmallModel(near_copy(seed=3))
    engine = Engine(target_of(model()), Lookup(draft) if lookup else draft, policy_for("eagle"))
    assert NOT_FINITE not in engine.generate(PROMPT, max_new_tokens=8).stats.notes
    with hooked(draft.lm.model.lm_head, lambda logits: logits + value):
        found = engine.generate(PROMPT, max_new_tokens=8)
    assert found.token_ids == plainly(8)
    assert found.stats.notes.count(NOT_FINITE) == 1
    assert NOT_FINITE not in engine.generate(PROMPT, max_new_tokens=8, policy="plain").stats.notes
    assert NOT_FINITE not in engine.generate(PROMPT, max_new_tokens=8).stats.notes
