"""Training of DFlash heads: blocks as they are served, their loss, kept states, and heads that serve afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from specengine.checkpoints.eagle import load_head
from specengine.drafters.dflash import Dflash
from specengine.engine import Engine
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.dflash import DflashConfig
from specengine.models.eagle import default_layer_ids
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, from_model
from specengine.ops.tree import TokenTree
from specengine.train.draft.losses import block_states, loss_of
from specengine.train.draft.new_heads import new_head
from specengine.train.draft.options import TrainOptions, make_loss
from specengine.train.draft.teacher import Teacher
from specengine.train.draft.training import LOG, train_draft
from specengine.train.draft.validation import agreement, fit_temperatures
from specengine.train.text import SynthesisOptions
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.synthesis import write_corpus
from tests.heads import LAYERS, block_config, deep
from tests.toy import VOCABULARY, byte_tokenizer, tiny, tiny_head

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = TrainOptions(
    steps=8,
    batch_tokens=96,
    lengths=(48,),
    learning_rate=3e-3,
    autocast=False,
    validate_every=8,
    save_every=4,
)
LOSS = make_loss("dflash", steps=5, anchors=0.5)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"windows": (4, 0, 9), "causal": (True, False, True)},
    "windows both ways": {"windows": (4, 4, 4)},
    "causal": {"causal": (True, True, True)},
    "biases": {"qkv_bias": True, "o_bias": True},
    "two positions": {"block_size": 2},
}


def text(length: int = 20, answer: int = 4) -> Text:
    tokens = torch.arange(length, dtype=torch.int32) * 37 % VOCABULARY
    return Text(tokens, torch.arange(length) >= answer)


def teacher_for(config: DflashConfig) -> Teacher:
    return Teacher(deep(), config.feature_ids(LAYERS))


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_trained_as_they_are_served(variant: str) -> None:
    config = block_config(**VARIANTS[variant])
    head, teacher = tiny_head(config), teacher_for(config)
    reading = teacher.read_text(text())
    anchors = torch.tensor([[0, 3, 4, 11, 17, -1]])
    trained = block_states(head, teacher, reading.features, reading.tokens, anchors)
    tokens, target = reading.tokens[0].tolist(), HuggingFaceTarget(deep())
    for place, anchor in enumerate(anchors[0, :-1].tolist()):
        draft = Dflash(head, target.lm)
        target.want(draft.traits.features)
        target.reset()
        draft.begin(tokens[: anchor + 1], target.prefill(tokens[: anchor + 1]))
        step = draft.root(TokenTree.root(tokens[anchor + 1], 8))
        rows = step.logits if step.further is None else torch.cat([step.logits, step.further])
        logits = teacher.head(trained[0, place])
        torch.testing.assert_close(rows, log_softmax(logits, -1), rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_cross_entropy_of_each_position() -> None:
    config = block_config()
    head, teacher = tiny_head(config).train().requires_grad_(True), teacher_for(config)
    one = text()
    reading = teacher.read_text(one)
    loss = replace(LOSS, anchors=1.0, decay=0.5)
    report = loss_of(loss, head, teacher, reading, one.answers[None], measure=True)
    anchors = torch.arange(2, 18)[
        None
    ]  # the answer begins at token 4, and a block's second token is predicted first
    states = block_states(head, teacher, reading.features, reading.tokens, anchors)[0]
    chances = teacher.head(reading.states[0]).softmax(-1)
    total, hits = torch.zeros(()), []
    for depth in range(5):
        inside = anchors[0] + 1 + depth < 19
        logs = log_softmax(teacher.head(states[inside, depth]), -1)
        aims = chances[(anchors[0] + 1 + depth)[inside]]
        total = total - 0.5**depth * (aims * logs).sum(-1).mean()
        hits.append(float((logs.argmax(-1) == aims.argmax(-1)).float().mean()))
    torch.testing.assert_close(report.loss, total, rtol=1e-4, atol=1e-4)
    assert report.hits == pytest.approx(hits)
    report.loss.backward()
    expected = torch.autograd.grad(total, head.fc.weight)[0]
    torch.testing.assert_close(head.fc.weight.grad, expected, rtol=1e-3, atol=1e-4)


def test_a_block_predicts_nothing_from_what_comes_after_its_anchor() -> None:
    """Tokens after a block's first, and states after its anchor, change nothing."""
    config = block_config()
    head, teacher = tiny_head(config), teacher_for(config)
    reading = teacher.read_text(text())
    anchors = torch.tensor([[6]])
    expected = block_states(head, teacher, reading.features, reading.tokens, anchors)
    features, tokens = reading.features.clone(), reading.tokens.clone()
    features[:, 7:], tokens[:, 8:] = 9.0, 1
    assert torch.equal(block_states(head, teacher, features, tokens, anchors), expected)
    tokens[:, 7] = 1
    assert not torch.equal(block_states(head, teacher, features, tokens, anchors), expected)


def test_a_new_head_begins_with_the_last_layers_of_its_target() -> None:
    model = deep("qwen3")
    counts = torch.ones(VOCABULARY)
    counts[7] = 0
    head: Any = new_head(model, replace(OPTIONS, layers=3), LOSS, counts)
    assert head.config.kind == "DFlash"
    assert (head.config.block_size, head.config.mask_token_id) == (6, 7)
    assert head.config.layer_ids == default_layer_ids(LAYERS)
    for layer, source in zip(head.layers, model.model.layers[-3:], strict=True):
        assert torch.equal(layer.self_attn.k_proj.weight, source.self_attn.k_proj.weight)
        assert torch.equal(layer.mlp.down_proj.weight, source.mlp.down_proj.weight)
    assert torch.equal(head.norm.weight, model.model.norm.weight)
    assert all(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize(
    ("head", "loss", "message"),
    [
        ("dflash", "ttt", "loss: got ttt for an? DFlash head, accepted dflash for DFlash heads"),
        ("eagle3", "dflash", "loss: got dflash for an? EAGLE-3 head"),
        ("dflash", "eagle", "which an? DFlash head does not predict"),
    ],
)
def test_losses_of_another_head_are_refused(
    tmp_path: Path, head: Any, loss: str, message: str
) -> None:
    corpus = Corpus.create(tmp_path / "data", {"target": "tiny", "vocab_size": VOCABULARY})
    corpus.add(0, [text(), text(30)])
    with pytest.raises(InputError, match=message):
        train_draft(deep(), corpus, tmp_path / "out", replace(OPTIONS, head=head), make_loss(loss))
    assert not (tmp_path / "out").exists()


def test_layers_are_of_dflash_heads_alone() -> None:
    options = replace(OPTIONS, layers=3)
    with pytest.raises(InputError, match="layers: got 3, accepted 0 for eagle3"):
        new_head(deep(), options, make_loss("ttt"), torch.ones(VOCABULARY))
    head = new_head(deep(), OPTIONS, LOSS, torch.ones(VOCABULARY))
    assert head.config.num_layers == 2


def test_more_positions_than_a_block_has_are_refused(tmp_path: Path) -> None:
    corpus = Corpus.create(tmp_path / "data", {"target": "tiny", "vocab_size": VOCABULARY})
    corpus.add(0, [text(), text(30)])
    first = train_draft(deep(), corpus, tmp_path / "first", replace(OPTIONS, steps=1), LOSS)
    more = replace(LOSS, steps=6)
    options = replace(OPTIONS, start=str(first))
    with pytest.raises(InputError, match="steps: got 6, the head predicts 5"):
        train_draft(deep(), corpus, tmp_path / "second", options, more)


def native_corpus(folder: Path, family: str = "qwen3") -> tuple[NativeLM, Corpus]:
    lm = from_model(tiny(family, num_hidden_layers=LAYERS))
    settings = SynthesisOptions(tokens=1500, rows=8, length=48)
    return lm, write_corpus(
        NativeTarget(lm),
        byte_tokenizer(),
        folder,
        settings,
        name="tiny",
        features=default_layer_ids(lm.layers),
    )


def test_kept_states_train_a_head_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is not run again; after an interruption the weights are the same; answers are exact."""
    lm, corpus = native_corpus(tmp_path / "data")

    def run(*_: Any, **__: Any) -> Any:
        raise AssertionError("the target was run")

    options = replace(OPTIONS, held_back=0.1, layers=1)
    with monkeypatch.context() as patch:
        patch.setattr(NativeLM, "run", run)
        patch.setattr(NativeLM, "run_lanes", run)
        whole = train_draft(lm, corpus, tmp_path / "whole", options, LOSS)
        train_draft(lm, corpus, tmp_path / "cut", options, LOSS, stop_after=4)
        (tmp_path / "cut" / LOG).write_text("")
        cut = train_draft(lm, corpus, tmp_path / "cut", options, LOSS)
    heads = [load_head(folder) for folder in (cut, whole)]
    assert all(torch.equal(heads[0].state[name], part) for name, part in heads[1].state.items())
    assert heads[1].config.kind == "DFlash"
    assert len(heads[1].config.temperatures) == 5
    model = tiny("qwen3", num_hidden_layers=LAYERS)
    plain = Engine.from_pretrained(model, policy="plain").generate([5, 6, 7], max_new_tokens=20)
    engine = Engine.from_pretrained(model, str(whole), policy="ddtree")
    assert engine.generate([5, 6, 7], max_new_tokens=20).token_ids == plain.token_ids


def test_a_target_with_a_cap_is_refused(tmp_path: Path) -> None:
    lm, corpus = native_corpus(tmp_path / "data", "cohere2")
    with pytest.raises(UnsupportedModelError, match="soft cap"):
        train_draft(lm, corpus, tmp_path / "out", OPTIONS, LOSS)


def test_training_brings_agreement(tmp_path: Path) -> None:
    """On text that repeats itself, which a random target reads well enough for the head to follow."""
    model = deep("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
    corpus = write_corpus(
        HuggingFaceTarget(model, pack=False),
        byte_tokenizer(),
        tmp_path / "data",
        SynthesisOptions(tokens=4000, rows=16, length=48),
        name="tiny",
    )
    options = replace(
        OPTIONS, steps=150, batch_tokens=384, layers=1, held_back=0.1, validate_every=150,
        learning_rate=2e-2,
    )  # fmt: skip
    out = train_draft(model, corpus, tmp_path / "head", options, replace(LOSS, anchors=1.0))
    config, state, _ = load_head(out)
    trained: Any = config.network()
    trained.load_state_dict(state)
    teacher = Teacher(model, config.feature_ids(LAYERS))
    texts = list(corpus)[:40]
    untrained = new_head(model, options, LOSS, torch.ones(VOCABULARY))
    before, _ = agreement(untrained, teacher, texts, autocast=False)
    after, _ = agreement(trained, teacher, texts, autocast=False)
    assert after[0] > before[0] + 0.08
    assert len(after) == 5


@torch.no_grad()
def test_temperatures_take_back_a_factor_on_the_logits() -> None:
    """The head of a target whose states are twice as long: all depths are too sure by the same factor."""
    config = block_config(num_layers=1, windows=(0,), causal=(False,))
    teacher, texts = teacher_for(config), [text(40), text(33)]
    head = tiny_head(config)
    temperatures = fit_temperatures(head, teacher, texts)
    assert len(temperatures) == 5
    head.norm.weight *= 0.5
    halved = fit_temperatures(head, teacher, texts)
    ratios: Tensor = torch.tensor(temperatures) / torch.tensor(halved)
    inside = (torch.tensor(halved) > 0.51) & (torch.tensor(temperatures) < 1.95)
    assert torch.allclose(ratios[inside], torch.full_like(ratios[inside], 2.0), rtol=0.1)
