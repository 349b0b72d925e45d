"""The losses against what they stand for: the draft as it serves, the target's own distributions, plain formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from specengine.drafters.eagle import EagleDraft
from specengine.errors import InputError, UnsupportedModelError
from specengine.models.eagle import EagleHead, default_layer_ids
from specengine.models.huggingface import CausalLM
from specengine.ops.tree import TokenTree
from specengine.train.draft import losses
from specengine.train.draft.losses import Labels, Unrolling, loss_of
from specengine.train.draft.options import Loss, make_loss
from specengine.train.draft.teacher import Reading, Teacher
from tests.examples import examples
from tests.toy import VOCABULARY, head_config, hooked, tiny, tiny_head

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, LENGTH = 6, 24


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=LAYERS)


def head_for(version: Any, seed: int = 0, **changes: Any) -> EagleHead:
    return tiny_head(head_config(version, **changes), seed).requires_grad_(True)


def teacher_for(model: PreTrainedModel, head: EagleHead) -> Teacher:
    return Teacher(model, head.config.feature_ids(LAYERS))


def text(seed: int = 0, batch: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens, and answers among them."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, length), generator=random)
    answers = torch.rand(batch, length, generator=random) > 0.3
    answers[:, -1] = True
    return tokens, answers


def greedy_text(model: PreTrainedModel, length: int = LENGTH) -> Tensor:
    """A text that is the target's own best token everywhere behind the first."""
    return model.generate(
        torch.tensor([[7], [11]]),
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
        do_sample=False,
    )


# ---------------------------------------------------------------------------------------------------- the teacher


@torch.no_grad()
def states_behind(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1]


def path_to(layers: Any, batch: int, anchor: int, depth: int, node: int) -> list[int]:
    path: list[int] = []
    for layer in reversed(layers[: depth + 1]):
        path.insert(0, int(layer.tokens[batch, anchor, node]))
        node = int(layer.parents[batch, anchor, node])
    return path


def test_the_targets_tree_is_its_own_beam(model: PreTrainedModel) -> None:
    """Each node's state is that of its path alone, and no child left out has a larger path probability."""
    teacher, width = Teacher(model, default_layer_ids(LAYERS)), 3
    tokens, _ = text()
    anchors = torch.tensor([[3, 9, 20], [0, 1, 22]])
    layers = teacher.grow(teacher.read(tokens, keep_cache=True), anchors, width=width, depths=3)
    for batch, row in enumerate(anchors.tolist()):
        for anchor, position in enumerate(row):
            prefix = tokens[batch, : position + 1].tolist()
            beam = {(): 0.0}
            for depth, layer in enumerate(layers):
                scores: dict[tuple[int, ...], float] = {}
                for path, score in beam.items():
                    with torch.no_grad():
                        logits = model(torch.tensor([[*prefix, *path]])).logits[0, -1]
                    best = logits.log_softmax(-1).topk(width)
                    scores |= {
                        (*path, int(t)): score + float(p) for p, t in zip(*best, strict=True)
                    }
                beam = dict(sorted(scores.items(), key=lambda item: -item[1])[:width])
                paths = [
                    tuple(path_to(layers, batch, anchor, depth, node)) for node in range(width)
                ]
                assert set(paths) == set(beam)
                for node, path in enumerate(paths):
                    expected = states_behind(model, [*prefix, *path])
                    torch.testing.assert_close(
                        layer.states[batch, anchor, node], expected, rtol=1e-4, atol=1e-4
                    )


def test_targets_with_other_logits_than_their_heads_are_refused() -> None:
    capped = tiny(
        "Gemma2",
        num_hidden_layers=LAYERS,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=1.0,
    )
    with pytest.raises(UnsupportedModelError, match="soft cap"):
        Teacher(capped, (LAYERS,))
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        Teacher(tiny(), (5,))


# ---------------------------------------------------------------------------------------------------- rows in training


def serving_states(
    head: EagleHead, model: PreTrainedModel, reading: Reading, anchor: tuple[int, int], layers: Any
) -> Any:
    """Recurrent states of the root and of each layer's nodes behind one anchor, step by step through the drafter."""
    batch, row = anchor
    drafter = EagleDraft(head, CausalLM(model, pack=False), pack=False)
    drafter.begin(reading.tokens[batch, : row + 1].tolist(), reading.features[batch, : row + 1])
    tree = TokenTree.root(int(reading.tokens[batch, row + 1]), 64)
    found = [drafter.root(tree).hidden]
    nodes = tree.root_alone()
    for tokens, parents in layers:
        tree.passes += 1
        nodes = tree.add(nodes.ids[parents], tokens, torch.zeros(len(tokens)))
        found.append(drafter.step(tree, nodes).hidden)
    return found


@pytest.mark.sliced(1)
@pytest.mark.parametrize("window", [0, 2, 4])
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("name", ["hass", "ttt", "talf"])
def test_rows_are_those_of_the_serving_draft(
    model: PreTrainedModel, name: str, version: Any, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every state that carries a loss equals explicit step-by-step inference through the draft's cache, to 1e-4."""
    head = head_for(version, sliding_window=window)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    reading = teacher.read(tokens, keep_cache=True)
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    first: list[Tensor] = []
    anchored: list[Tensor] = []
    _spy(monkeypatch, calls, first, anchored)
    loss = replace(make_loss(name), regression=0.0, noise=0.0)
    loss_of(loss, head, teacher, reading, answers)
    assert len(calls) == loss.steps - 1
    checked = 0
    for batch, rows in enumerate(anchored[0].tolist()):
        for place, row in enumerate(rows):
            if row < 0:
                continue
            steps = [
                (t[batch, place], p[batch, place])
                for t, p, _ in calls
                if loss.width or row + 2 < LENGTH
            ]
            inside = len(steps) if loss.width else min(len(steps), LENGTH - 2 - row)
            expected = serving_states(head, model, reading, (batch, row), steps[:inside])
            torch.testing.assert_close(first[0][batch, row], expected[0][0], rtol=0, atol=1e-4)
            for (_, _, states), wanted in zip(calls, expected[1:], strict=False):
                torch.testing.assert_close(states[batch, place], wanted, rtol=0, atol=1e-4)
                checked += len(wanted)
    assert checked > 50


def _spy(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any], first: list[Tensor], anchored: list[Tensor]
) -> None:
    class Spied(Unrolling):
        def __init__(
            self, head: Any, teacher: Any, features: Any, tokens: Any, anchors: Tensor
        ) -> None:
            super().__init__(head, teacher, features, tokens, anchors)
            anchored.append(anchors)

        def first(self) -> Tensor:
            first.append(super().first())
            return first[-1]

        def next(self, tokens: Tensor, parents: Tensor, *, detach: bool) -> Tensor:
            calls.append((tokens, parents, super().next(tokens, parents, detach=detach)))
            return calls[-1][2]

    monkeypatch.setattr(losses, "Unrolling", Spied)


def test_labels_are_the_targets_distributions_one_token_further_at_each_step(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step j behind row r, the distribution after token r + 1 + j, over the draft's vocabulary."""
    head = head_for(3)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    seen: list[tuple[Tensor, Tensor]] = []
    original = Labels.cross_entropy

    def spied(self: Labels, states: Tensor, index: Tensor, loss: Loss, *, measure: bool) -> Any:
        seen.append((states, self.probabilities[index]))
        return original(self, states, index, loss, measure=measure)

    monkeypatch.setattr(Labels, "cross_entropy", spied)
    loss_of(make_loss("ttt", steps=3), head, teacher, teacher.read(tokens), answers)
    with torch.no_grad():
        target = model(tokens).logits[..., head.target_ids()].softmax(-1)
    for step, (states, found) in enumerate(seen):
        expected = [
            target[batch, row + 1 + step]
            for batch in range(2)
            for row in range(LENGTH - 2)
            if answers[batch, row + 2]
            and row + 2 + step < LENGTH
            and answers[batch, row + 2 + step]
        ]
        assert len(states) == len(expected)
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- one and another


def gradients(
    loss: Loss, head: EagleHead, teacher: Teacher, tokens: Tensor, answers: Tensor, **options: Any
) -> Any:
    head.zero_grad()
    report = loss_of(loss, head, teacher, teacher.read(tokens, keep_cache=True), answers, **options)
    report.loss.backward()
    return float(report.loss.detach()), gradients_of(head)


def gradients_of(head: EagleHead) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("version", [1, 3])
def test_talf_with_one_node_has_the_gradient_of_hass(model: PreTrainedModel, version: Any) -> None:
    """Detached, without regression, on text that is the target's best token throughout."""
    head = head_for(version)
    teacher = teacher_for(model, head)
    tokens = greedy_text(model)
    answers = torch.zeros(tokens.shape, dtype=torch.bool)
    answers[:, 2 : LENGTH - 3] = True  # anchors from which both see all three steps
    _, of_talf = gradients(
        replace(make_loss("talf"), width=1, detach=True), head, teacher, tokens, answers
    )
    _, of_chain = _hass_by_hand(head, teacher, tokens, answers, beyond=True)
    assert_same(of_talf, of_chain)


@pytest.mark.parametrize("version", [1, 3])
def test_hass_without_regression_is_its_formula(model: PreTrainedModel, version: Any) -> None:
    head = head_for(version)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    hass = replace(make_loss("hass"), regression=0.0, cross_entropy=1.0, top_weight=0.0)
    found, of_loss = gradients(hass, head, teacher, tokens, answers)
    expected, of_chain = _hass_by_hand(head, teacher, tokens, answers, beyond=False)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_same(of_loss, of_chain)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-3, atol=1e-4 * float(gradient.abs().max())
        )


def _hass_by_hand(
    head: EagleHead, teacher: Teacher, tokens: Tensor, answers: Tensor, *, beyond: bool
) -> Any:
    """The cross-entropies of three detached steps along the text behind each answer token, each step a mean.

    beyond: later steps count whether or not their token is an answer, as they do in a tree.
    """
    head.zero_grad()
    reading = teacher.read(tokens)
    anchors = torch.arange(LENGTH - 1).expand(len(tokens), -1).clone()
    unrolling = Unrolling(head, teacher, reading.features, tokens, anchors)
    logits, ids = teacher.head(reading.states), head.target_ids()
    total = torch.zeros(())
    for step in range(3):
        if step == 0:
            states = unrolling.first()
        else:
            shifted = torch.roll(tokens, -1 - step, dims=1)[:, : LENGTH - 1, None]
            states = unrolling.next(shifted, torch.zeros_like(shifted), detach=True)[:, :, 0]
        terms = []
        for batch, row in answers[:, 2:].nonzero().tolist():
            if row + 2 + step >= LENGTH or not (beyond or answers[batch, row + 2 + step]):
                continue
            label = logits[batch, row + 1 + step]
            known = ids is None or int(label.argmax()) in ids.tolist()
            aim = (label if ids is None else label[ids]).softmax(-1) * known
            draft = head.logits(states[batch, row])
            draft = teacher.head(states[batch, row]) if draft is None else draft
            terms.append(-(aim * draft.log_softmax(-1)).sum())
        total = total + torch.stack(terms).mean()
    total.backward()
    return float(total.detach()), gradients_of(head)


def test_detached_steps_teach_nothing_to_the_steps_before(model: PreTrainedModel) -> None:
    head = head_for(3)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    free, tied = (
        gradients(make_loss("ttt", steps=2, detach=d), head, teacher, tokens, answers)
        for d in (False, True)
    )
    assert free[0] == pytest.approx(tied[0])
    assert not torch.allclose(free[1]["fc.weight"], tied[1]["fc.weight"], rtol=1e-3)


def test_the_eagle_loss_is_its_formula(model: PreTrainedModel) -> None:
    head = head_for(1)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    loss = replace(make_loss("eagle"), noise=0.0)
    found, _ = gradients(loss, head, teacher, tokens, answers)
    reading = teacher.read(tokens)
    anchors = torch.full((2, 1), 0)
    with torch.no_grad():
        states = Unrolling(head, teacher, reading.features, tokens, anchors).first()[:, :-1]
        rows = answers[:, 2:]
        aim = reading.states[:, 1:-1]
        distance = smooth_l1_loss(states, aim, reduction="none").mean(-1)[rows].mean()
        draft = teacher.head(states).log_softmax(-1)
        entropy = -(teacher.head(aim).softmax(-1) * draft).sum(-1)[rows].mean()
    assert found == pytest.approx(float(1.0 * distance + 0.1 * entropy), rel=1e-4)


def test_noise_and_anchors_are_drawn_from_the_generator(model: PreTrainedModel) -> None:
    head = head_for(1)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    for loss in (make_loss("eagle"), make_loss("ttt", anchors=0.5)):
        values = [
            gradients(
                loss, head, teacher, tokens, answers, generator=torch.Generator().manual_seed(s)
            )[0]
            for s in (1, 1, 2)
        ]
        assert values[0] == values[1] != values[2]


def test_the_steps_add_up_with_their_decay(model: PreTrainedModel) -> None:
    head = head_for(3)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    one, two, halved = (
        gradients(make_loss("ttt", steps=steps, decay=decay), head, teacher, tokens, answers)[0]
        for steps, decay in ((1, 1.0), (2, 1.0), (2, 0.5))
    )
    assert halved == pytest.approx(one + 0.5 * (two - one), rel=1e-5)


def test_measured_hits_and_overlap(model: PreTrainedModel) -> None:
    """Of a draft whose logits are the target's own, all; of one that is wrong, none."""
    head = head_for(1)
    teacher = teacher_for(model, head)
    reading = teacher.read(text()[0])
    labels = Labels(teacher, head)
    rows = labels.add(reading.states[0])
    loss, *found = labels.cross_entropy(reading.states[0], rows, make_loss("ttt"), measure=True)
    assert found == [LENGTH, pytest.approx(LENGTH, rel=1e-5)]
    entropies = torch.distributions.Categorical(logits=teacher.head(reading.states[0])).entropy()
    assert float(loss) == pytest.approx(float(entropies.sum()), rel=1e-5)  # no draft can do better
    _, hits, overlap = labels.cross_entropy(
        -reading.states[0], rows, make_loss("ttt"), measure=True
    )
    assert hits == 0
    assert overlap < 1


# ---------------------------------------------------------------------------------------------------- cross-entropy


@examples(30)
@given(
    version=st.sampled_from([1, 3]),
    rows=st.integers(1, 12),
    block=st.integers(1, 5),
    chunk=st.sampled_from([1, 300, 5000]),
    top=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_chunked_cross_entropy_is_the_plain_one(
    model: PreTrainedModel, version: Any, rows: int, block: int, chunk: int, top: float, seed: int
) -> None:
    """Value and every gradient, however it is cut into chunks, in value against torch's own log-softmax."""
    head = head_for(version, seed)
    teacher = teacher_for(model, head)
    random = torch.Generator().manual_seed(seed)
    labels = Labels(teacher, head)
    labels.add(torch.randn(7, 32, generator=random))
    index = torch.randint(7, (rows,), generator=random)
    states = torch.randn(rows, 32, generator=random).requires_grad_(True)
    loss = replace(make_loss("ttt"), cross_entropy=0.3, top_k=4, top_weight=top)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "BLOCK", block)
        patch.setattr(losses, "CHUNK_VALUES", (chunk, chunk))
        (2 * labels.cross_entropy(states, index, loss, measure=False)[0]).backward()
        found, *_ = labels.cross_entropy(states, index, loss, measure=False)
    into = states.grad.clone()
    into_head = None if version == 1 else head.lm_head.weight.grad.clone()
    states.grad = None
    head.zero_grad()
    expected = _plain(head, teacher, labels, states, index, loss)
    (2 * expected).backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(into, states.grad, rtol=1e-3, atol=1e-4)
    if into_head is not None:
        torch.testing.assert_close(into_head, head.lm_head.weight.grad, rtol=1e-3, atol=1e-4)


def _plain(
    head: EagleHead, teacher: Teacher, labels: Labels, states: Tensor, index: Tensor, loss: Loss
) -> Tensor:
    logits = head.logits(states)
    draft = (teacher.head(states) if logits is None else logits).log_softmax(-1)
    aim = labels.probabilities[index]
    weights = torch.full_like(aim, loss.cross_entropy)
    if loss.top_weight:
        best = aim.topk(loss.top_k, dim=-1).indices
        weights = weights + loss.top_weight * torch.zeros_like(aim).scatter_(1, best, 1.0)
    return -(aim * weights * draft).sum(-1)[labels.best[index] >= 0].sum()


def test_rows_whose_best_token_the_draft_cannot_say_teach_nothing(model: PreTrainedModel) -> None:
    head = head_for(3)
    teacher = teacher_for(model, head)
    inside, outside = (
        int(token) for token in (head.target_ids()[5], _first_missing(head.target_ids()))
    )
    rows = torch.randn(2, 32)
    labels = Labels(teacher, head)
    with hooked(teacher.head, lambda logits: logits.index_fill(1, torch.tensor([inside]), 50.0)):
        labels.add(rows[:1])
    with hooked(teacher.head, lambda logits: logits.index_fill(1, torch.tensor([outside]), 50.0)):
        labels.add(rows[1:])
    assert labels.best.tolist() == [5, -1]
    states = torch.randn(2, 32, requires_grad=True)
    loss, *_ = labels.cross_entropy(states, torch.tensor([0, 1]), make_loss("ttt"), measure=True)
    loss.backward()
    assert states.grad is not None
    assert states.grad.any(dim=1).tolist() == [True, False]
    torch.testing.assert_close(labels.probabilities.sum(-1), torch.ones(2))


def _first_missing(ids: Tensor) -> int:
    return next(token for token in range(VOCABULARY) if token not in set(ids.tolist()))


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"width": -1}, "width"),
        ({"anchors": 0.0}, "anchors"),
        ({"decay": 1.5}, "decay"),
        ({"regression": float("nan")}, "regression"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"^{field}: got"):
        make_loss("ttt", **changes)


def test_what_does_not_fit_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(
        InputError,
        match="loss: got 'l2', accepted eagle, hass, ttt, talf, dflash, eagle-paper, hass-paper",
    ):
        make_loss("l2")
    head = head_for(3)
    teacher = teacher_for(model, head)
    tokens, answers = text()
    with pytest.raises(InputError, match="EAGLE-3 head does not predict"):
        loss_of(make_loss("hass"), head, teacher, teacher.read(tokens), answers)
    with pytest.raises(InputError, match="answers: no answer"):
        loss_of(make_loss("ttt"), head, teacher, teacher.read(tokens), torch.zeros_like(answers))
