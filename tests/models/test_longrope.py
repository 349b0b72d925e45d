"""LongRoPE: the frequencies switch where the text passes the original context, and everything is run again."""

import pytest
import torch
from transformers import PreTrainedModel

from specengine import Engine
from specengine.models.huggingface import HuggingFaceTarget, LongRopeTarget, switches
from specengine.request.prompts import CONTEXT_SOURCES
from tests.sweep.serving import NEW, Knowing, generated as generated_with_cache, prompt_of
from tests.sweep.small import VOCABULARY, model_of
from tests.toy import policy_for, random_tree

pytestmark = pytest.mark.usefixtures("one_thread")
ORIGINAL = 25
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return what transformers answers without a cache; 5.17 drops one at the switch, and reads one token then."""
    return generated_with_cache(model, prompt, cached=False)


@pytest.fixture(scope="module")
def phi() -> PreTrainedModel:
    return model_of(
        "phi3", rope_parameters=ROPE, original_max_position_embeddings=ORIGINAL, sliding_window=None
    )


@pytest.mark.parametrize("length", [3, 20, 24, 25, 26, 40])
def test_answers_pass_the_original_context(phi: PreTrainedModel, length: int) -> None:
    prompt = prompt_of(length)
    expected = generated(phi, prompt)
    plain = Engine.from_pretrained(phi, policy="plain")
    assert plain.generate(prompt, max_new_tokens=NEW, eos_token_id=[]).token_ids == expected
    engine = Engine.from_pretrained(phi, Knowing([*prompt, *expected]), policy_for("eagle"))
    answer = engine.generate(prompt, max_new_tokens=NEW, eos_token_id=[])
    assert answer.token_ids == expected
    assert answer.stats.num_accepted_draft_tokens > 8


def test_the_long_frequencies_matter(phi: PreTrainedModel) -> None:
    short = model_of("phi3", sliding_window=None)
    prompt = prompt_of(40)
    assert generated(phi, prompt) != generated(short, prompt)


def test_nodes_beyond_the_original_context_are_not_entered(phi: PreTrainedModel) -> None:
    target, tree = LongRopeTarget(phi), random_tree(2, 20, VOCABULARY, root=5)
    with torch.inference_mode():
        target.prefill(prompt_of(ORIGINAL - 2))
        logits, _ = target.verify(tree)
        assert (logits.isnan().all(-1) == (tree.depths >= 2)).all()
        target.prefill(prompt_of(ORIGINAL))
        logits, _ = target.verify(tree)
        assert logits.isfinite().all()


def test_another_prompt_has_its_own_frequencies(phi: PreTrainedModel) -> None:
    engine = Engine.from_pretrained(phi, policy="plain")
    for length in (40, 5, 24, 40):
        prompt = prompt_of(length)
        assert engine.generate(prompt, max_new_tokens=NEW, eos_token_id=[]).token_ids == generated(
            phi, prompt
        )
    target = LongRopeTarget(phi)
    with torch.inference_mode():
        target.prefill(prompt_of(40))
    assert target.cached(prompt_of(40)) == 40
    assert target.cached(prompt_of(20)) == 0


def test_a_text_is_rated_as_it_would_be_written(phi: PreTrainedModel) -> None:
    text, engine = prompt_of(40), Engine.from_pretrained(phi, policy="plain")
    found = [entry.logprob for entry in engine.score(text)]
    for place in (10, ORIGINAL - 1, ORIGINAL, 38):
        logits = phi(input_ids=torch.tensor([text[: place + 1]])).logits[0, -1].log_softmax(-1)
        assert found[place] == pytest.approx(logits[text[place + 1]].item(), abs=1e-3)


def test_where_transformers_does_not_run_again_the_context_ends() -> None:
    model = model_of("llama", rope_parameters=ROPE)
    assert not switches(model.config)
    assert HuggingFaceTarget(model).max_context == ORIGINAL
    answer = Engine.from_pretrained(model, policy="plain").generate(
        prompt_of(20), max_new_tokens=9, eos_token_id=[]
    )
    assert len(answer.token_ids) == 5
    ends = "max_new_tokens: the answer ends with the context, 25 tokens of prompt and answer"
    assert answer.stats.notes == [f"{ends}; {CONTEXT_SOURCES}"]
