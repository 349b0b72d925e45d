"""Room for long answers is made as they grow: what is kept, what is not taken at once, and what cannot be had."""

from typing import Any

import pytest
import torch

from specengine import Engine
from specengine.drafters.small_model import SmallModel
from specengine.engine import generation
from specengine.errors import InputError
from specengine.models import kv_cache
from specengine.request.sampling import History
from tests.engine.engines import PROMPT, engine_of, near_copy, plainly
from tests.toy import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def stream_into(seen: list[int], made: Engine) -> None:
    for piece in made.stream(PROMPT, max_new_tokens=40):
        seen += piece.cycle.tokens


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that hold hardly more than there is, so that every few tokens they grow."""
    monkeypatch.setattr(generation, "MIN_ROOM", 2)
    monkeypatch.setattr(kv_cache, "GRANULE", 1)


@pytest.mark.sliced(1)
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("backend", ["native", "huggingface"])
@pytest.mark.parametrize("draft", ["none", "ngram", "recycling", "small model"])
def test_answers_do_not_change_where_caches_grow(draft: str, backend: str) -> None:
    named: Any = SmallModel(near_copy()) if draft == "small model" else draft
    made = Engine.from_pretrained(tiny(), named, backend=backend)
    assert made.target.cache.capacity < 60  # type: ignore[attr-defined]
    prompt = PROMPT[:3]
    assert made.generate(prompt, max_new_tokens=120).token_ids == plainly("llama", prompt, 120)
    sampled: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 4,
        "max_new_tokens": 100,
        "repetition_penalty": 1.1,
    }
    assert (
        made.generate(prompt, **sampled).token_ids
        == engine_of(draft="none").generate(prompt, **sampled).token_ids
    )
    assert made.generate(prompt * 12, max_new_tokens=40).token_ids == plainly(
        "llama", prompt * 12, 40
    )


@pytest.mark.parametrize("backend", ["native", "huggingface"])
@pytest.mark.parametrize("draft", ["none", "small model"])
def test_a_large_limit_takes_no_memory_of_its_own(draft: str, backend: str) -> None:
    model = tiny(max_position_embeddings=1 << 20)
    named: Any = (
        SmallModel(tiny(max_position_embeddings=1 << 20)) if draft == "small model" else draft
    )
    made = Engine.from_pretrained(model, named, backend=backend)
    end = plainly("llama", PROMPT, 8)[5]
    expected = plainly("llama", PROMPT, 8, eos_token_id=end)
    for count in (10**6, 10**4000):
        answer = made.generate(PROMPT, max_new_tokens=count, eos_token_id=end)
        assert (answer.token_ids, answer.finish_reason) == (expected, "stop")
    parts = [made.target, *([made.drafter] if draft == "small model" else [])]
    assert max(part.cache.capacity for part in parts) < 4096  # type: ignore[union-attr]


def test_a_stream_goes_on_past_the_first_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MIN_ROOM", 16)
    made = engine_of(draft="ngram")
    reserved: list[int] = []
    reserve = made.drivers.own.eager.reserve

    def noted(tokens: int) -> None:
        reserved.append(tokens)
        reserve(tokens)

    monkeypatch.setattr(made.drivers.own.eager, "reserve", noted)
    tokens = [
        token for piece in made.stream(PROMPT, max_new_tokens=200) for token in piece.cycle.tokens
    ]
    assert tokens == plainly("llama", PROMPT, 200)
    assert reserved[0] == len(PROMPT) + 16
    assert reserved[-1] == len(PROMPT) + 200
    assert len(reserved) < 6  # each time for twice as many


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
@pytest.mark.parametrize("at", ["first", "later"])
def test_no_memory_is_an_error_of_ours(
    error: Exception, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MIN_ROOM", 8)
    made = engine_of(draft="ngram")
    seen: list[int] = []

    def refuse(tokens: int) -> None:
        if at == "first" or tokens > len(PROMPT) + 8:
            raise error

    monkeypatch.setattr(made.drivers.own.eager, "reserve", refuse)
    with pytest.raises(InputError, match="max_new_tokens: not enough memory to cache"):
        stream_into(seen, made)
    assert seen == plainly("llama", PROMPT, 40)[: len(seen)]
    assert bool(seen) == (at == "later")
    monkeypatch.undo()
    assert made.generate(PROMPT, max_new_tokens=12).token_ids == plainly("llama", PROMPT, 12)


def test_a_history_grows_and_views_of_it_stay() -> None:
    history = History([1, 2], 2)
    before = history.ids
    for token in range(3, 40):
        history.append(token)
    assert before.tolist() == [[1, 2]]
    assert history.ids.tolist() == [list(range(1, 40))]
    empty = History([], 0)
    empty.append(7)
    assert torch.equal(empty.ids, torch.tensor([[7]]))
