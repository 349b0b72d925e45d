"""Training a draft from nothing: it learns, resumes to the same curve, and what it saves serves."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specengine.checkpoints.eagle import load_head, save_head
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.models.eagle import causal, default_layer_ids
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, from_model
from specengine.train.draft import new_heads
from specengine.train.draft.losses import loss_of
from specengine.train.draft.new_heads import Weights, _vocabulary_size, new_head, start_from_text
from specengine.train.draft.options import TrainOptions, make_loss
from specengine.train.draft.teacher import ServingTeacher, StoredTeacher, Teacher
from specengine.train.draft.training import LOG, STATE, Epochs, pack, train_draft
from specengine.train.draft.validation import agreement, autocasting
from specengine.train.text import SynthesisOptions
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.synthesis import write_corpus
from tests.toy import VOCABULARY, byte_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
OPTIONS = TrainOptions(
    steps=12,
    batch_tokens=96,
    lengths=(32, 48),
    learning_rate=3e-3,
    draft_vocab_size=100,
    autocast=False,
    validate_every=6,
    save_every=4,
)
LOSS = make_loss("ttt", steps=3, anchors=0.5)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen3", num_hidden_layers=LAYERS)


def random_texts(count: int, seed: int = 0) -> list[Text]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(10, 60, (count,), generator=random).tolist()
    return [
        Text(
            torch.randint(VOCABULARY, (length,), generator=random, dtype=torch.int32),
            torch.arange(length) > 4,
        )
        for length in lengths
    ]


def corpus_of(folder: Path, *shards: list[Text]) -> Corpus:
    corpus = Corpus.create(folder, {"target": "tiny", "vocab_size": VOCABULARY})
    for number, texts in enumerate(shards):
        corpus.add(number, texts)
    return corpus


def log(folder: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    return [
        {key: value for key, value in entry.items() if not key.endswith("seconds")}
        for entry in entries
    ]


# ---------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("able", [True, False])
def test_bfloat16_where_the_processor_multiplies_it(
    able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: able)
    for enabled in (True, False):
        with autocasting(torch.device("cpu"), enabled=enabled):
            assert torch.is_autocast_enabled("cpu") == (able and enabled)


def test_batches_hold_every_text_once() -> None:
    """Whole texts one behind the other; what a sequence cuts off begins the next one."""
    texts = [
        Text(torch.full((n,), i, dtype=torch.int32), torch.ones(n, dtype=torch.bool))
        for i, n in enumerate([20] * 9)
    ]
    batches = pack(texts, OPTIONS)
    assert [tuple(batch.tokens.shape) for batch in batches] == [(3, 32), (2, 48), (3, 32)]
    rows = [row.tolist() for batch in batches for row in batch.tokens]
    whole = {token for row in rows for token in row if row.count(token) == 20}
    assert whole == set(range(9))
    for row in rows:
        assert row.count(row[0]) == 20, "a sequence begins with a whole text"


def test_texts_longer_than_a_sequence_are_cut() -> None:
    text = Text(torch.arange(100, dtype=torch.int32), torch.ones(100, dtype=torch.bool))
    batch = pack([text], replace(OPTIONS, lengths=(32,)))[0]
    assert batch.tokens.tolist() == [list(range(32))] * 3


def test_epochs_have_every_batch_once_in_another_order(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, random_texts(12))
    options = replace(OPTIONS, held_back=0.1)
    epochs = Epochs(corpus, options)
    assert len(epochs.held_back) == 2
    size = len(epochs.batches)
    stream = [id(batch) for batch in itertools.islice(epochs, 2 * size)]
    whole = sorted(map(id, epochs.batches))
    assert size > 1
    assert sorted(stream[:size]) == sorted(stream[size:]) == whole
    assert stream[:size] != stream[size:]


def test_text_that_came_later_is_not_read_by_a_resumed_run(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, random_texts(12))
    first = Epochs(corpus, OPTIONS)
    corpus.add(1, random_texts(8, seed=1))
    again, larger = Epochs(corpus, OPTIONS, first.shards), Epochs(corpus, OPTIONS)
    assert first.shards == again.shards == [0]
    assert larger.shards == [0, 1]
    assert len(larger.batches) > len(first.batches)
    for one, other in zip(itertools.islice(first, 9), itertools.islice(again, 9), strict=True):
        assert torch.equal(one.tokens, other.tokens)


def test_corpora_without_answers_are_refused(tmp_path: Path) -> None:
    silent = [Text(torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([False] * 3))]
    with pytest.raises(InputError, match="no text with an answer"):
        Epochs(corpus_of(tmp_path, silent), OPTIONS)


# ---------------------------------------------------------------------------------------------------- new heads


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_new_heads_begin_with_what_the_target_knows(model: PreTrainedModel, kind: Any) -> None:
    counts = torch.arange(VOCABULARY)
    options = replace(OPTIONS, head=kind)
    head = new_head(model, options, LOSS, counts)
    assert torch.isfinite(torch.cat([p.flatten() for p in head.parameters()])).all()
    assert all(p.requires_grad for p in head.parameters())
    if kind == "eagle3":
        noise = head.fc.weight[:, -32:] - torch.eye(32)
        assert float(noise.detach().std()) < 0.03
        ids = head.target_ids()
        assert ids is not None
        assert ids.tolist() == list(range(VOCABULARY - 100, VOCABULARY))  # the most frequent ones
        assert torch.equal(head.lm_head.weight, model.lm_head.weight[ids])
        assert torch.equal(head.norm.weight, model.model.norm.weight)
        assert torch.equal(
            head.layers[0].mlp.up_proj.weight, model.model.layers[-1].mlp.up_proj.weight
        )
        assert torch.equal(
            head.layers[0].self_attn.q_proj.weight[:, 32:],
            model.model.layers[-1].self_attn.q_proj.weight,
        )
    blank = new_head(model, replace(options, start="random"), LOSS, counts)
    assert float(blank.fc.weight.detach().std()) < 0.03


def test_an_eagle1_head_begins_as_the_best_linear_guess(model: PreTrainedModel) -> None:
    head = new_head(model, replace(OPTIONS, head="eagle1"), LOSS, torch.ones(VOCABULARY))
    teacher = Teacher(model, head.config.feature_ids(2))
    batches = [torch.randint(0, VOCABULARY, (4, 64)) for _ in range(4)]
    start_from_text(head, teacher, batches)

    features = torch.cat([teacher.read(tokens).features for tokens in batches])
    embedded = model.get_input_embeddings()(torch.cat(batches))[:, 1:]
    inputs = (
        torch.cat([embedded, features[:, :-1], torch.ones(*embedded.shape[:2], 1)], -1)
        .flatten(0, 1)
        .double()
    )
    wanted = features[:, 1:].flatten(0, 1)
    best = inputs @ torch.linalg.lstsq(inputs, wanted.double()).solution
    with torch.no_grad():
        positions = torch.arange(63)[None].expand(len(features), -1)
        guess = head(features[:, :-1], embedded, positions, causal).flatten(0, 1)
    assert float((guess - wanted).square().mean()) <= 1.01 * float((best - wanted).square().mean())


def test_the_kind_of_head_follows_the_loss(model: PreTrainedModel) -> None:
    for name, version in {"eagle": 1, "hass": 1, "ttt": 3, "talf": 3}.items():
        assert (
            new_head(model, OPTIONS, make_loss(name), torch.ones(VOCABULARY)).config.version
            == version
        )


def test_training_goes_on_from_a_head(model: PreTrainedModel, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(12))
    first = train_draft(model, corpus, tmp_path / "first", OPTIONS, LOSS)
    options = replace(OPTIONS, start=str(first), learning_rate=1e-9, steps=1)
    second = train_draft(model, corpus, tmp_path / "second", options, LOSS)
    for name, tensor in load_head(first).state.items():
        torch.testing.assert_close(load_head(second).state[name], tensor, rtol=0, atol=1e-6)


def test_a_head_to_start_from_may_become_wider(model: PreTrainedModel, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(12))
    first = train_draft(model, corpus, tmp_path / "first", OPTIONS, LOSS)
    teacher = Teacher(model, load_head(first).config.feature_ids(LAYERS))
    size = load_head(first).config.intermediate_size
    heads = [
        new_head(
            model,
            replace(OPTIONS, start=str(first), intermediate_size=wide),
            LOSS,
            torch.ones(VOCABULARY),
        )
        for wide in (0, size + 24)
    ]
    assert heads[1].config.intermediate_size == size + 24
    narrow, wider = (
        agreement(head, teacher, random_texts(4, seed=1), autocast=False)[1] for head in heads
    )
    assert wider == pytest.approx(narrow, abs=1e-6)


def test_a_head_to_start_from_keeps_its_largest_units(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(12))
    first = train_draft(model, corpus, tmp_path / "first", OPTIONS, LOSS)
    config, state, _ = load_head(first)
    teacher = Teacher(model, config.feature_ids(LAYERS))
    idle = torch.arange(0, config.intermediate_size, 3)
    for name in [name for name in state if name.endswith("up_proj.weight")]:
        state[name][idle] = 0.0
    save_head(config, state, tmp_path / "idle")
    left = config.intermediate_size - len(idle)
    whole, cut, too_few = (
        new_head(
            model,
            replace(OPTIONS, start=str(tmp_path / "idle"), intermediate_size=size),
            LOSS,
            torch.ones(VOCABULARY),
        )
        for size in (0, left, left // 2)
    )
    texts = random_texts(4, seed=1)
    before, after, less = (
        agreement(head, teacher, texts, autocast=False)[1] for head in (whole, cut, too_few)
    )
    assert cut.config.intermediate_size == left
    assert after == pytest.approx(before, abs=1e-5)
    assert less != pytest.approx(before, abs=1e-5)


@pytest.mark.parametrize("size", [-1, 0, 24])
def test_a_head_starts_with_the_largest_units_of_its_target(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("specengine.train.draft.new_heads.MAX_UNITS", 30)
    model = copy.deepcopy(model)
    mlp = model.get_decoder().layers[-1].mlp
    units = mlp.up_proj.weight.shape[0]
    with torch.no_grad():
        for number, unit in enumerate(torch.randperm(units)):  # in a random order, the largest last
            mlp.up_proj.weight[unit] *= (1 + number) / mlp.up_proj.weight[unit].norm()
    weight = torch.stack(
        [
            mlp.gate_proj.weight.norm(dim=1),
            mlp.up_proj.weight.norm(dim=1),
            mlp.down_proj.weight.norm(dim=0),
        ]
    ).prod(dim=0)
    left = {-1: 30, 0: units, 24: 24}[size]
    kept = [unit for unit in range(units) if (weight > weight[unit]).sum() < left]
    head = new_head(model, replace(OPTIONS, intermediate_size=size), LOSS, torch.ones(VOCABULARY))
    assert head.config.intermediate_size == len(kept) == left < units or not size
    own = dict(head.layers.named_parameters())
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(own[f"0.mlp.{name}.weight"], getattr(mlp, name).weight[kept])
    assert torch.equal(own["0.mlp.down_proj.weight"], mlp.down_proj.weight[:, kept])


def test_a_head_to_start_from_may_learn_more_tokens(model: PreTrainedModel, tmp_path: Path) -> None:
    """New rows are the target's as the head's own would be: by the linear map that makes its rows of the target's."""
    corpus = corpus_of(tmp_path / "data", random_texts(12))
    its = model.get_output_embeddings().weight.detach()
    trained = train_draft(
        model,
        corpus,
        tmp_path / "trained",
        replace(OPTIONS, draft_vocab_size=its.shape[1] + 20),
        LOSS,
    )
    config, state, _ = load_head(trained)
    old = (state["d2t"] + torch.arange(len(state["d2t"]))).tolist()
    turned = torch.randn(its.shape[1], its.shape[1], generator=torch.Generator().manual_seed(0))
    save_head(config, state | {"lm_head.weight": its[old] @ turned}, tmp_path / "first")
    counts = torch.arange(VOCABULARY).flip(0)  # the first tokens are the most frequent ones
    start = replace(OPTIONS, start=str(tmp_path / "first"))
    size = len(old) + 30
    wide = new_head(model, replace(start, draft_vocab_size=size), LOSS, counts)
    ids = wide.target_ids().tolist()
    new = [token for token in range(VOCABULARY) if token not in old][:30]
    assert ids == sorted({*old, *new})
    rows = {token: row for row, token in enumerate(ids)}
    weight = wide.lm_head.weight
    assert torch.equal(weight[[rows[token] for token in old]], its[old] @ turned)
    torch.testing.assert_close(
        weight[[rows[token] for token in new]], its[new] @ turned, rtol=1e-3, atol=1e-3
    )
    assert wide.config.draft_vocab_size == size
    save_head(wide.config, wide.state_dict(), tmp_path / "wide")
    assert load_head(tmp_path / "wide").state["d2t"].tolist() == [
        token - row for token, row in rows.items()
    ]
    for kept in (0, len(old)):
        head = new_head(model, replace(start, draft_vocab_size=kept), LOSS, counts)
        assert head.target_ids().tolist() == old


def test_a_head_to_start_from_gets_the_tokens_that_cover_other_answers(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_heads, "MIN_VOCABULARY", 10)
    monkeypatch.setattr(new_heads, "VOCABULARY_STEP", 10)
    corpus = corpus_of(tmp_path / "data", random_texts(12))
    first = train_draft(
        model, corpus, tmp_path / "first", replace(OPTIONS, draft_vocab_size=20), LOSS
    )
    old = (load_head(first).state["d2t"] + torch.arange(20)).tolist()
    missing = [token for token in range(VOCABULARY) if token not in old][5:30]
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    counts[missing] = 7
    options = replace(OPTIONS, start=str(first), draft_vocab_size=-1)
    ids = new_head(model, options, LOSS, counts).target_ids().tolist()
    assert len(ids) == 50, "25 missing ones, in steps of ten"
    assert set(ids) > {*old, *missing}


# ---------------------------------------------------------------------------------------------------- the loop


def test_the_saved_head_is_the_average_of_those_on_the_way(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(20))
    options = replace(OPTIONS, average=0.2)
    steps = [train_draft(model, corpus, tmp_path / "each", OPTIONS, LOSS, stop_after=step) and
             torch.load(tmp_path / "each" / STATE, weights_only=True)["head"] for step in (1, 2, 3)]  # fmt: skip
    averaged = train_draft(model, corpus, tmp_path / "averaged", options, LOSS, stop_after=3)
    assert log(averaged)[0] == log(tmp_path / "each")[0]
    # what is new: the beginning is left sooner than options.average says
    shares = [1 - 2 / 11, 1 - 0.2]
    expected = {name: tensor.clone() for name, tensor in steps[0].items()}
    for head, share in zip(steps[1:], shares, strict=True):
        for name, tensor in head.items():
            if tensor.is_floating_point():
                expected[name] += share * (tensor - expected[name])
    for name, tensor in load_head(averaged).state.items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype))


def test_from_nothing_to_a_head_that_serves(tmp_path: Path) -> None:
    """A random Qwen3 of two layers writes its text, and a draft learns from it: agreement on text that was held back
    rises well above that of an untrained head, and the engine drafts with it without changing the answer."""
    target = tiny("qwen3")
    with (
        torch.no_grad()
    ):  # a random target's attention is noise, which nothing could learn from so little text
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
    tokenizer = byte_tokenizer()
    text = write_corpus(
        HuggingFaceTarget(target, pack=False),
        tokenizer,
        tmp_path / "data",
        SynthesisOptions(tokens=6000, rows=16, length=64),
        name="tiny",
    )
    options = replace(
        OPTIONS, head="eagle1", steps=150, lengths=(64,), batch_tokens=512, learning_rate=5e-3, held_back=0.1,
        validate_every=150, save_every=150,
    )  # fmt: skip
    loss = make_loss("talf", width=2, steps=2, anchors=0.3)
    out = train_draft(target, text, tmp_path / "head", options, loss, name="tiny")
    config, _, _ = load_head(out)
    teacher = Teacher(target, config.feature_ids(2))
    texts = Epochs(text, options).held_back
    untrained = new_head(target, options, loss, torch.ones(VOCABULARY))
    before, _ = agreement(untrained, teacher, texts, autocast=False)
    *_, after, _ = (entry.get("held_back") for entry in log(out))
    assert after["hits"][0] > before[0] + 0.15
    assert after["tokens_per_cycle"] > 1.2
    plain = Engine.from_pretrained(target, policy="plain", tokenizer=tokenizer)
    engine = Engine.from_pretrained(target, str(out), policy="eagle", tokenizer=tokenizer)
    answer = engine.generate("abc", max_new_tokens=40)
    assert answer.token_ids == plain.generate("abc", max_new_tokens=40).token_ids
    assert answer.stats.mean_acceptance_length > 1.2


@pytest.mark.sliced(1)
@pytest.mark.parametrize("average", [0.0, 0.5])
def test_a_killed_training_resumes_to_the_same_curve(
    model: PreTrainedModel, average: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two savings, with a log that is ahead of the last one, and text that has grown since."""
    options = replace(OPTIONS, average=average)
    texts = random_texts(30)
    whole = train_draft(model, corpus_of(tmp_path / "a", texts), tmp_path / "whole", options, LOSS)
    corpus, lines = corpus_of(tmp_path / "b", texts), []
    step = torch.optim.AdamW.step

    def dies(self: Any, *arguments: Any, **named: Any) -> Any:
        lines.append(0)
        if len(lines) == 7:
            raise KeyboardInterrupt
        return step(self, *arguments, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        train_draft(model, corpus, tmp_path / "cut", options, LOSS)
    monkeypatch.undo()
    # the rest of the line was not written any more
    (tmp_path / "cut" / LOG).open("a").write('{"step": 7, "loss"')
    corpus.add(1, random_texts(5, seed=9))
    said: list[str] = []
    resumed = train_draft(model, corpus, tmp_path / "cut", options, LOSS, progress=said.append)
    assert "resuming at step 4 of 12" in said
    assert log(resumed) == log(whole)
    states = [load_head(folder).state for folder in (resumed, whole)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    states = [torch.load(folder / STATE, weights_only=True)["head"] for folder in (resumed, whole)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_a_training_begun_otherwise_is_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(20))
    out = train_draft(model, corpus, tmp_path / "head", OPTIONS, LOSS, stop_after=4)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    for options, loss in (
        (replace(OPTIONS, learning_rate=1e-3), LOSS),
        (OPTIONS, make_loss("ttt", steps=2)),
    ):
        with pytest.raises(InputError, match="begun with"):
            train_draft(model, corpus, out, options, loss)
    other = corpus_of(tmp_path / "other", random_texts(20, seed=9))
    with pytest.raises(InputError, match="begun with text"):
        train_draft(model, other, out, OPTIONS, LOSS)
    (out / STATE).write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"training\.pt is damaged"):
        train_draft(model, corpus, out, OPTIONS, LOSS)
    (out / STATE).write_bytes(before[STATE])
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_text_of_another_target_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, random_texts(4))
    with pytest.raises(InputError, match="vocabulary of 260; this target has 100"):
        train_draft(
            tiny(vocab_size=100, num_hidden_layers=LAYERS), corpus, tmp_path / "head", OPTIONS, LOSS
        )


def test_a_loss_that_is_not_finite_ends_the_training(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    corpus = corpus_of(tmp_path / "data", random_texts(20))
    with pytest.raises(InputError, match="learning_rate: the loss was"):
        train_draft(
            model, corpus, tmp_path / "head", replace(OPTIONS, learning_rate=1e30, clip=1e30), LOSS
        )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"lengths": (4096,)}, "lengths"),
        ({"lengths": ()}, "lengths"),
        ({"head": "medusa"}, "head"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"clip": float("inf")}, "clip"),
        ({"warmup": 1.0}, "warmup"),
        ({"average": 1.0}, "average"),
        ({"held_back": -0.1}, "held_back"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: got"):
        replace(OPTIONS, **changes)


def test_key_value_heads_must_divide_the_heads(model: PreTrainedModel) -> None:
    with pytest.raises(InputError, match="kv_heads: got 3, accepted divisors of the 4 heads"):
        new_head(model, replace(OPTIONS, kv_heads=3), LOSS, torch.ones(VOCABULARY))


# ---------------------------------------------------------------------------------------------------- kept states


def native_corpus(
    folder: Path, family: str = "qwen2", tokens: int = 1500
) -> tuple[NativeLM, Corpus]:
    lm = from_model(tiny(family, num_hidden_layers=LAYERS))
    features = default_layer_ids(lm.layers)
    text = SynthesisOptions(tokens=tokens, rows=8, length=48)
    return lm, write_corpus(
        NativeTarget(lm), byte_tokenizer(), folder, text, name="tiny", features=features
    )


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_kept_states_teach_what_the_target_would(tmp_path: Path, family: str) -> None:
    """Labels, features and losses next to those of the target that reads the texts again, rounded to bfloat16."""
    lm, corpus = native_corpus(tmp_path, family)
    texts = list(corpus)[:4]
    ids = default_layer_ids(lm.layers)
    stored = StoredTeacher(NativeTarget(lm), ids, Weights.of(lm).vocabulary)
    serving = ServingTeacher(NativeTarget(lm), ids)
    vocabulary = torch.arange(0, VOCABULARY, 2)
    head = new_head(lm, OPTIONS, LOSS, torch.ones(VOCABULARY))
    for text in texts:
        kept, read = stored.read_text(text), serving.read_text(text)
        torch.testing.assert_close(kept.features.float(), read.features, rtol=1e-2, atol=1e-2)
        rows = text.answers.nonzero()[:, 0] - 1
        for own in (vocabulary, None):
            best, chances = stored.labels(kept.states[0, rows], own)
            expected, of_all = serving.labels(read.states[0, rows], own)
            assert torch.equal(best, expected)
            seen = chances > 0
            assert float((chances.float().sum(1) - 1).abs().max()) < 0.02
            ratio = of_all.float() / (of_all.float() * seen).sum(1, keepdim=True)
            torch.testing.assert_close(chances.float()[seen], ratio[seen], rtol=0.03, atol=0.003)
        losses = [
            float(
                loss_of(
                    LOSS, head, teacher, reading, text.answers[None], generator=torch.Generator()
                ).loss.detach()
            )
            for teacher, reading in ((stored, kept), (serving, read))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_target_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head and biases; the head that is saved drafts for the target, and one step changes it."""
    lm, corpus = native_corpus(tmp_path / "data")
    said: list[str] = []

    def run(*_: Any, **__: Any) -> Any:
        raise AssertionError("the target was run")

    options = replace(OPTIONS, held_back=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(NativeLM, "run", run)
        patch.setattr(NativeLM, "run_lanes", run)
        patch.setattr(type(lm), "model", property(run))
        out = train_draft(lm, corpus, tmp_path / "head", options, LOSS, progress=said.append)
    assert not [line for line in said if "again" in line]
    config, state, _ = load_head(out)
    assert config.qkv_bias
    biases = [name for name in state if name.endswith("q_proj.bias")]
    assert len(biases) == 1
    model = lm.source.model()
    plain = Engine.from_pretrained(model, policy="plain", tokenizer=byte_tokenizer())
    engine = Engine.from_pretrained(model, str(out), policy="eagle", tokenizer=byte_tokenizer())
    assert "native" in engine.target.backend
    assert (
        engine.generate("abc", max_new_tokens=30).token_ids
        == plain.generate("abc", max_new_tokens=30).token_ids
    )


@pytest.mark.parametrize("loss", ["talf", "hass"])
def test_losses_that_need_more_than_kept_states_say_so(tmp_path: Path, loss: str) -> None:
    lm, corpus = native_corpus(tmp_path / "data")
    said: list[str] = []
    options, chosen = replace(OPTIONS, steps=1), make_loss(loss, anchors=0.2)
    train_draft(lm, corpus, tmp_path / "head", options, chosen, progress=said.append)
    assert [
        line
        for line in said
        if "does not suffice for this loss: transformers runs the target again" in line
    ]


def test_text_without_states_is_read_again(tmp_path: Path) -> None:
    lm = from_model(tiny("qwen3", num_hidden_layers=LAYERS))
    said: list[str] = []
    corpus = corpus_of(tmp_path / "data", random_texts(12))
    train_draft(
        lm, corpus, tmp_path / "head", replace(OPTIONS, steps=1), LOSS, progress=said.append
    )
    assert [line for line in said if "was kept with states None, [2, 3, 3] are needed" in line]


def test_a_training_on_kept_states_resumes_to_the_same_curve(tmp_path: Path) -> None:
    lm, corpus = native_corpus(tmp_path / "data")
    whole = train_draft(lm, corpus, tmp_path / "whole", OPTIONS, LOSS)
    train_draft(lm, corpus, tmp_path / "cut", OPTIONS, LOSS, stop_after=4)
    (tmp_path / "cut" / LOG).write_text(
        "".join((tmp_path / "cut" / LOG).read_text().splitlines(keepends=True)[:1])
    )
    cut = train_draft(lm, corpus, tmp_path / "cut", OPTIONS, LOSS)
    states = [load_head(folder).state for folder in (cut, whole)]
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


def test_time_chooses_the_steps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, corpus = native_corpus(tmp_path / "data")
    monkeypatch.setattr("specengine.train.draft.training.MIN_STEPS", 7)
    said: list[str] = []
    options = replace(OPTIONS, save_every=2)
    train_draft(
        lm,
        corpus,
        tmp_path / "head",
        options,
        LOSS,
        seconds=1e-6,
        stop_after=3,
        progress=said.append,
    )
    assert [line for line in said if line.startswith("7 steps in 0.0 hours")]
    out = train_draft(
        lm, corpus, tmp_path / "head", options, LOSS, seconds=1e6, progress=said.append
    )
    assert "resuming at step 3 of 7" in said
    assert log(out)[-1]["step"] == 7


def test_the_draft_vocabulary_covers_the_answers() -> None:
    counts = torch.zeros(100_000, dtype=torch.int64)
    counts[:10] = 1000
    assert _vocabulary_size(counts) == 8192
    counts[:20_000] = 100
    assert _vocabulary_size(counts) == 20 * 1024
    counts[:] = 1
    assert _vocabulary_size(counts) == 32768
    assert _vocabulary_size(counts[:500]) == 500
