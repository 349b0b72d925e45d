"""The drafters: what they propose, and that their caches follow what is committed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from bench.short_models import first_layers
from specengine import drafters, policies
from specengine.drafters import Drafter
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel
from specengine.engine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.ops import Nodes
from specengine.ops.select import Step
from specengine.ops.tree import TokenTree
from specengine.records import Cycle, Seconds
from tests.examples import examples
from tests.toy import VOCABULARY, RandomShape, Tables, ToyTarget, byte_tokenizer, nodes_of, tiny

PROMPT = [*range(40, 52)]


pytestmark = pytest.mark.usefixtures("one_thread")


def proposed(draft: Drafter, root: int, path: Sequence[int] = ()) -> dict[int, float]:
    """Probabilities that the draft gives to the children of the node at the end of `path`."""
    tree = TokenTree.root(root, len(path) + 1)
    for node, token in enumerate(path):
        tree.add(torch.tensor([node]), torch.tensor([token]), torch.zeros(1))
    step = draft.step(tree, nodes_of([len(path)]))
    assert step.normalized
    tokens = range(step.logits.shape[1]) if step.token_ids is None else step.token_ids.tolist()
    return {
        token: math.exp(value)
        for token, value in zip(tokens, step.logits[0].tolist(), strict=True)
        if value > -math.inf
    }


def committed(root: int, tokens: list[int]) -> Cycle:
    """A cycle of the root alone that committed `tokens`."""
    return Cycle(TokenTree.root(root), [0], tokens, Seconds())


# ---------------------------------------------------------------------------------------------------- n-grams


def test_ngram_probabilities_by_hand() -> None:
    draft = NGram(longest=2, shortest=1)
    draft.begin([1, 2, 3, 1, 2, 4, 1, 2, 3, 1])
    # (1, 2) was followed by 3 twice and 4 once: 2/4, 1/4; the remaining 1/4 goes to (2), followed by the same
    assert proposed(draft, root=2) == pytest.approx(
        {3: 1 / 2 + 1 / 4 * 2 / 4, 4: 1 / 4 + 1 / 4 * 1 / 4}
    )
    # (2, 3) was followed by 1 twice, as was (3)
    assert proposed(draft, root=2, path=[3]) == pytest.approx({1: 2 / 3 + 1 / 3 * 2 / 3})
    # (3, 9) was never seen, and (9) neither
    assert proposed(draft, root=3, path=[9]) == {}
    # (4, 2) was never seen, but (2) was
    assert proposed(draft, root=4, path=[2]) == pytest.approx({3: 2 / 4, 4: 1 / 4})


def test_ngram_suffixes_shorter_than_the_shortest_do_not_count() -> None:
    draft = NGram(longest=3, shortest=2)
    draft.begin([1, 2, 3, 4, 5])
    assert proposed(draft, root=2) == {}  # (5, 2) never occurred
    draft.begin([1, 2, 3, 4, 5, 1])
    assert proposed(draft, root=2) == pytest.approx({3: 1 / 2})
    assert proposed(draft, root=2, path=[3]) == pytest.approx(
        {4: 1 / 2 + 1 / 2 * 1 / 2}
    )  # (1, 2, 3), then (2, 3)


@examples(60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.data(),
)
def test_ngram_probabilities_never_exceed_one_and_longer_suffixes_win(
    tokens: list[int], shortest: int, more: int, data: st.DataObject
) -> None:
    draft = NGram(longest=shortest + more, shortest=shortest)
    draft.begin(tokens)
    root = data.draw(st.integers(0, 3))
    found = proposed(draft, root)
    assert sum(found.values()) < 1.0
    context = [*tokens, root]
    for length in range(min(shortest + more, len(context)), shortest - 1, -1):
        suffix = context[-length:]
        followers = {
            tokens[i + length]
            for i in range(len(tokens) - length)
            if tokens[i : i + length] == suffix
        }
        if followers:
            share = sum(found[token] for token in followers)
            occurrences = sum(tokens[i : i + length] == suffix for i in range(len(tokens) - length))
            assert share >= occurrences / (occurrences + 1) - 1e-6
            break
    else:
        assert found == {}


def test_ngram_follows_what_is_committed() -> None:
    grown, whole = NGram(longest=3, shortest=1), NGram(longest=3, shortest=1)
    grown.begin([5, 6])
    grown.accept(committed(root=7, tokens=[5, 6, 7]))  # the last one is the next root
    whole.begin([5, 6, 7, 5, 6])
    assert proposed(grown, root=7) == proposed(whole, root=7) != {}


def test_ngram_begins_where_prompts_agree_and_anew_where_they_do_not() -> None:
    draft = NGram(longest=2, shortest=1)
    draft.begin([1, 2, 3])
    for prompt in ([1, 2, 3, 1, 2], [1, 2], [1, 9, 3, 1], [], [4, 4]):
        draft.begin(prompt)
        fresh = NGram(longest=2, shortest=1)
        fresh.begin(prompt)
        for context in ([1], [2, 3], [9], [4]):
            assert draft._seen.matches(context) == fresh._seen.matches(context)
        assert draft._seen.tail == fresh._seen.tail
    draft.reset()
    assert draft._seen.tail == draft._seen.matches([4]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 1, "shortest": 2}, "got 2, 1, accepted 1 <= shortest <= longest"),
        ({"shortest": 0}, "got 0, 5, accepted 1 <= shortest <= longest"),
    ],
)
def test_ngram_refuses_impossible_lengths(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NGram(**options)


def test_ngram_in_an_engine_speeds_up_repetition() -> None:
    class Loop(Tables):
        def logits(self, context: Any) -> Tensor:
            return torch.eye(6)[(context[-1] + 1) % 6] * 9.0

    engine = Engine(ToyTarget(Loop(6)), NGram(), policies.make("chain", length=5))
    result = engine.generate([0, 1, 2, 3, 4, 5, 0, 1], max_new_tokens=30)
    assert result.token_ids == [(2 + i) % 6 for i in range(30)]
    assert result.stats.num_spec_steps == 5


# ---------------------------------------------------------------------------------------------------- a small model


def dense(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


DRAFTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "Gemma2": {"head_dim": 8, "num_key_value_heads": 2, "query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize("family", DRAFTS)
def test_small_model_logits_equal_a_dense_recomputation(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of mixed depth, over many cycles in which paths of all lengths are committed."""
    model = tiny(family, **DRAFTS[family])
    draft = SmallModel(model)
    tables = Tables(40, 3, concentration=0.2)
    target = ToyTarget(tables)
    root, real, depths, checked = draft.root, draft.step, [], 0

    def checking(tree: TokenTree, frontier: Nodes | None = None) -> Step:
        nonlocal checked
        step = root(tree) if frontier is None else real(tree, frontier)
        nodes = (frontier or tree.root_alone()).alive()
        depths.append(len(set(tree.depths[nodes].tolist())))
        for row, node in enumerate(nodes.tolist()):
            tokens = [*target.tokens, int(tree.tokens[0]), *tree.path_tokens(node)]
            assert (step.logits[row] - dense(reference, tokens)).abs().max() < 1e-4
            checked += 1
        # a draft that knows the target, so that long paths are accepted
        known = [
            tables.logits([*target.tokens, int(tree.tokens[0]), *tree.path_tokens(n)])
            for n in nodes.tolist()
        ]
        return Step(torch.stack(known))

    reference = tiny(family, **DRAFTS[family])
    monkeypatch.setattr(draft, "step", checking)
    monkeypatch.setattr(draft, "root", checking)
    engine = Engine(target, draft, RandomShape(seed=1))
    result = engine.generate([1, 2, 3], max_new_tokens=60)
    assert max(depths) > 1
    assert checked > 80
    assert len(result.stats.acceptance_histogram) > 3
    assert draft.cache.length <= len(target.tokens)


@torch.inference_mode()
def test_small_model_runs_only_what_its_cache_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = SmallModel(tiny("llama"))
    extended: list[list[int]] = []
    real = draft.lm.extend
    monkeypatch.setattr(
        draft.lm,
        "extend",
        lambda cache, tokens, **_: extended.append(list(tokens)) or real(cache, tokens),
    )

    def root_logits(root: int) -> Tensor:
        return draft.root(TokenTree.root(root, 8)).logits[0]

    for prompt, run in (
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4, 5], [4, 5]),
        ([1, 2, 7], [7]),
        ([1], []),
        ([], []),
        ([8, 8], [8, 8]),
    ):
        draft.begin(prompt)
        logits = root_logits(9)
        assert extended.pop() == run
        assert (logits - dense(draft.lm.model, [*prompt, 9])).abs().max() < 1e-4
    draft.reset()
    draft.begin([8, 8])
    root_logits(9)
    assert extended.pop() == [8, 8]


@torch.inference_mode()
def test_small_model_catches_up_with_tokens_it_was_not_asked_about() -> None:
    draft = SmallModel(tiny("llama"))
    draft.begin([1, 2])
    tree = TokenTree.root(3, 4)
    draft.root(tree)
    for parent, token in ((0, 4), (1, 5)):
        tree.add(torch.tensor([parent]), torch.tensor([token]), torch.zeros(1))
    draft.accept(Cycle(tree, [0, 1, 2], [4, 5, 6], Seconds()))
    logits = draft.root(TokenTree.root(6, 4)).logits[0]
    assert (logits - dense(draft.lm.model, [1, 2, 3, 4, 5, 6])).abs().max() < 1e-4


@torch.inference_mode()
def test_small_model_takes_in_cycles_that_had_no_pass() -> None:
    """One after the other, as of a policy that drafts from nothing: their tokens wait in order."""
    draft = SmallModel(tiny("llama"))
    draft.begin([1, 2])
    for root, token in ((3, 4), (4, 5), (5, 6)):
        draft.accept(committed(root, [token]))
    logits = draft.root(TokenTree.root(6, 4)).logits[0]
    assert (logits - dense(draft.lm.model, [1, 2, 3, 4, 5, 6])).abs().max() < 1e-4


def test_a_larger_vocabulary_of_the_draft_is_cut_to_the_targets() -> None:
    target = HuggingFaceTarget(tiny("llama"))
    draft = SmallModel(tiny("llama", seed=1, vocab_size=VOCABULARY + 44), target.vocab_size)
    engine = Engine(target, draft, policies.make("eagle", width=4, expansions=2, budget=12))
    plain = Engine(target, None, None)
    assert (
        engine.generate(PROMPT, max_new_tokens=20).token_ids
        == plain.generate(PROMPT, max_new_tokens=20).token_ids
    )
    assert draft.root(TokenTree.root(1, 8)).logits.shape == (1, VOCABULARY)


def test_tokens_beyond_the_drafts_vocabulary_do_no_harm() -> None:
    """A target padded further than the draft may emit an id that the draft has no embedding for."""
    target = HuggingFaceTarget(tiny("llama"))
    plain = Engine(target, None, None).generate(PROMPT, max_new_tokens=24).token_ids
    draft = SmallModel(tiny("llama", seed=1, vocab_size=max(plain) - 20), target.vocab_size)
    engine = Engine(target, draft, policies.make("fixed", branching=(3, 2)))
    assert engine.generate(PROMPT, max_new_tokens=24).token_ids == plain


def test_a_draft_with_a_shorter_context_does_no_harm() -> None:
    target = HuggingFaceTarget(tiny("llama"))
    for family in ("llama", "gpt2"):
        draft = SmallModel(tiny(family, seed=1, max_position_embeddings=32))
        engine = Engine(target, draft, policies.make("fixed", branching=(2, 2)))
        expected = Engine(target, None, None).generate(PROMPT, max_new_tokens=40).token_ids
        assert engine.generate(PROMPT, max_new_tokens=40).token_ids == expected


# ---------------------------------------------------------------------------------------------------- tokenizers


def test_equal_tokenizers_pass_and_padding_does_not_matter(tmp_path: Path) -> None:
    tiny("llama", vocab_size=VOCABULARY + 9).save_pretrained(tmp_path)
    byte_tokenizer(template=None).save_pretrained(tmp_path)
    options: dict[str, Any] = {"tokenizer": byte_tokenizer(), "offline": True}
    engine = Engine.from_pretrained(tiny("llama"), str(tmp_path), lookup=False, **options)
    assert isinstance(engine.drafter, SmallModel)
    assert engine.drafter.token_ids is None


# ---------------------------------------------------------------------------------------------------- first layers


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_first_layers_share_the_weights_and_leave_the_model_alone(family: str) -> None:
    model = tiny(family)
    before = dense(model, PROMPT)
    short = first_layers(model, 1)
    mine = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    theirs = {name: parameter.data_ptr() for name, parameter in short.named_parameters()}
    assert theirs.items() <= mine.items()
    assert len(theirs) < len(mine)
    assert (short.config.num_hidden_layers, model.config.num_hidden_layers) == (1, 2)
    assert torch.equal(dense(model, PROMPT), before)
    assert not torch.equal(dense(short, PROMPT), before)
    assert torch.equal(dense(first_layers(model, 2), PROMPT), before)
    draft = SmallModel(short)
    assert draft.cache.slab.shape[0] == 1


def test_first_layers_says_what_it_accepts() -> None:
    model = tiny("llama")
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"count: got {count}, accepted 1 to 2"):
            first_layers(model, count)
    model.base_model.adapters = torch.nn.ModuleList()
    with pytest.raises(
        UnsupportedModelError, match=r"cannot tell which of \['layers', 'adapters'\] are its layers"
    ):
        first_layers(model, 1)


# ---------------------------------------------------------------------------------------------------- steps


def test_best_children_of_sparse_rows_are_those_proposed() -> None:
    rows = torch.tensor([[-1.0, -math.inf, -0.5], [-math.inf, -math.inf, -math.inf]])
    tree = TokenTree.root(0, 8)
    tree.add(torch.tensor([0]), torch.tensor([7]), torch.tensor([-2.0]))
    step = Step(rows, torch.tensor([10, 11, 12]), normalized=True)
    nodes = step.add_best_children(tree, nodes_of([0, 1]), 5)
    assert nodes.alive().tolist() == [2, 3]
    tree = tree.trimmed()
    assert tree.tokens.tolist() == [0, 7, 12, 10]
    assert tree.parents.tolist() == [-1, 0, 0, 0]
    assert tree.path_log_probs.tolist() == [0.0, -2.0, -0.5, -1.0]


def test_each_file_is_a_drafter() -> None:
    assert drafters.names() == sorted(drafters.names())
    assert {"ngram", "small_model"} <= set(drafters.names())
    with pytest.raises(TypeError, match="abstract"):
        Drafter()  # type: ignore[abstract]
