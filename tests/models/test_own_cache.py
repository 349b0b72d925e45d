"""Models that run no tree in one forward answer on their own cache, as `generate` does; none is refused plainly."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from specengine import Engine
from specengine.costs import PassCosts, measuring
from specengine.errors import UnsupportedModelError
from specengine.models import fused
from specengine.models.own_cache import OwnCacheLM, OwnCacheTarget, TreePaths
from specengine.ops.tree import TokenTree
from tests.sweep.serving import Knowing, generated, prompt_of
from tests.sweep.small import model_of
from tests.toy import policy_for, random_tree

pytestmark = pytest.mark.usefixtures("one_thread")
MODULES = "huggingface"  # the backend of transformers' modules: others run the hybrid natively


@pytest.fixture(scope="module")
def hybrid() -> PreTrainedModel:
    return model_of("olmo_hybrid")


@pytest.fixture(scope="module")
def recurrent() -> PreTrainedModel:
    return model_of("mamba")


def test_a_model_without_trees_is_decoded_plainly_with_a_note(recurrent: PreTrainedModel) -> None:
    prompt = prompt_of(9)
    for policy in ("plain", None):
        answer = Engine.from_pretrained(recurrent, policy=policy).generate(
            prompt, max_new_tokens=24, eos_token_id=[]
        )
        assert answer.token_ids == generated(recurrent, prompt)
        (note,) = answer.stats.notes
        assert note.startswith(
            "decoded plainly on its own cache: MambaForCausalLM: cannot roll back"
        )
        assert note.endswith("several tokens at once give other logits than one after the other")


def test_its_modules_run_where_layers_of_others_are_fused(
    recurrent: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "DEVICES", ("cpu",))
    target = OwnCacheTarget(recurrent, "cause", merge=True)
    assert target.lm.modules == "the model's own"


@pytest.mark.parametrize(
    ("draft", "policy", "named"), [("ngram", None, "draft"), (None, "eagle", "policy")]
)
def test_what_was_asked_for_is_refused_by_its_cause(
    recurrent: PreTrainedModel, draft: str | None, policy: str | None, named: str
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"^{named}: .*recurrent state.*served with policy='plain'"
    ):
        Engine.from_pretrained(recurrent, draft, policy)
    with pytest.raises(UnsupportedModelError, match=r"^strict: .*recurrent state"):
        Engine.from_pretrained(recurrent, draft, strict=True)
    assert Engine.from_pretrained(recurrent, policy="plain", strict=True).drafter is None


def test_trees_run_path_by_path(hybrid: PreTrainedModel) -> None:
    prompt = prompt_of(30)
    expected = generated(hybrid, prompt)
    engine = Engine.from_pretrained(
        hybrid, Knowing([*prompt, *expected]), policy_for("eagle"), backend=MODULES
    )
    answer = engine.generate(prompt, max_new_tokens=24, eos_token_id=[])
    assert answer.token_ids == expected
    assert answer.stats.num_accepted_draft_tokens > 8
    assert "trees are verified path by path on its own cache: OlmoHybrid" in answer.stats.notes[0]
    assert "recurrent state" in answer.stats.notes[0]


def test_auto_grows_chains_where_each_path_costs_a_row(
    hybrid: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[list[int]] = []
    run = OwnCacheLM.verify

    def verify(lm: OwnCacheLM, cache: Any, tree: TokenTree, features: tuple[int, ...] = ()) -> Any:
        shapes.append(tree.parents.tolist())
        return run(lm, cache, tree, features)

    prompt = prompt_of(30)
    expected = generated(hybrid, prompt)
    drafts = [Knowing([*prompt, *expected]), "recycling"]
    engines = [Engine.from_pretrained(hybrid, draft, backend=MODULES) for draft in drafts]
    monkeypatch.setattr(OwnCacheLM, "verify", verify)
    measured = measuring.measure(engines[0].target, engines[0].drafter, seconds=0.5)
    assert measured.chains
    assert max(measured.verify) <= measuring.MAX_CHAIN
    assert PassCosts.from_dict(measured.to_dict()) == measured
    for chains in (True, False):  # the latter is the negative control
        costs = PassCosts("known", {1: 1.0, 32: 1.5}, {1: 0.01}, chains=chains)
        for engine in engines:
            for _ in range(2):
                answer = engine.generate(
                    prompt,
                    max_new_tokens=24,
                    eos_token_id=[],
                    policy="auto",
                    policy_options={"costs": costs},
                )
                assert answer.token_ids == expected
            assert answer.stats.num_accepted_draft_tokens > 8
        assert all(shape == [*range(-1, len(shape) - 1)] for shape in shapes) == chains


def test_logits_of_paths_are_those_of_single_steps(hybrid: PreTrainedModel) -> None:
    target, tree, known = (
        OwnCacheTarget(hybrid, "cause"),
        random_tree(4, 14, 90, root=7),
        prompt_of(11),
    )
    with torch.inference_mode():
        target.prefill(known)
        logits, _ = target.verify(tree)
        for node in range(14):
            alone = OwnCacheTarget(hybrid, "cause")
            alone.prefill([*known, 7, *tree.path_tokens(node)][:-1])
            last = ([7, *tree.path_tokens(node)])[-1]
            step, _ = alone.verify(random_tree(0, 1, 90, root=last))
            torch.testing.assert_close(logits[node], step[0], atol=1e-4, rtol=1e-4)


def test_paths_are_padded_behind() -> None:
    paths = TreePaths(random_tree(1, 9, 50))
    assert len({tuple(path) for path in paths.nodes}) == len(paths.nodes)
    for node, (row, depth) in enumerate(zip(paths.row, paths.depth, strict=True)):
        assert paths.nodes[row][depth] == node


def test_a_session_reuses_the_cache_that_it_goes_on_with(hybrid: PreTrainedModel) -> None:
    engine, prompt = Engine.from_pretrained(hybrid, policy="plain", backend=MODULES), prompt_of(20)
    target = engine.target
    with torch.inference_mode():
        target.prefill(prompt)
        target.verify(random_tree(0, 1, 90, root=5))
        target.commit(random_tree(0, 1, 90, root=5), [0])
        assert target.cached([*prompt, 5, 6, 8]) == 21
        assert target.cached([*prompt, 6]) == 0  # its state cannot be taken back
        target.prefill([*prompt, 5, 6])
        step, _ = target.verify(random_tree(0, 1, 90, root=8))
        fresh = OwnCacheTarget(hybrid, "cause")
        fresh.prefill([*prompt, 5, 6])
        other, _ = fresh.verify(random_tree(0, 1, 90, root=8))
        torch.testing.assert_close(step, other, atol=1e-4, rtol=1e-4)


def test_a_text_is_rated(hybrid: PreTrainedModel, recurrent: PreTrainedModel) -> None:
    text = prompt_of(40)
    for model in (hybrid, recurrent):
        found = [
            entry.logprob for entry in Engine.from_pretrained(model, policy="plain").score(text)
        ]
        expected = model(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)
        wanted = expected[torch.arange(39), torch.tensor(text[1:])]
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-3, rtol=1e-3)


def test_graphs_are_refused(recurrent: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        Engine.from_pretrained(recurrent, policy="plain", graphs=True)


def test_models_of_other_kinds_stay_refused() -> None:
    t5 = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder models are not supported"):
        Engine.from_pretrained(transformers.T5ForConditionalGeneration(t5), policy="plain")
