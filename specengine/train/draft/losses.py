"""Losses of drafts: regression and cross-entropy along the text, or along a tree that the target grows.

All losses of EAGLE heads are one computation with different settings. From each position the draft is unrolled as when
it serves: the first step reads the target's hidden states, later steps read the draft's own output and the next token.
The steps of a DFlash head are the positions of its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, smooth_l1_loss

from specengine.errors import require_input
from specengine.models.dflash import DflashNet
from specengine.models.eagle import EagleHead, within
from specengine.train.draft.options import Loss
from specengine.train.draft.teacher import HeadTeacher, Reading

LABEL_ROWS = 256  # rows that the target's head reads at a time
BLOCK = 2048  # rows of the draft's head whose gradients are computed at once
# float32 logits at a time, on a CPU (fits its caches) and on a GPU
CHUNK_VALUES = 1 << 20, 1 << 28
NOISE_LENGTH = 512  # sequence length at which the noise has its nominal width


def check_fit(loss: Loss, head: EagleHead) -> None:
    """Raise InputError if the loss needs an output that the head does not have."""
    kind = head.config.kind
    require_input(
        f"loss: {loss.name} compares hidden states with the target's, which an {kind} head does not predict; "
        "use an EAGLE-1 head, or regression 0",
        not loss.regression or kind == "EAGLE-1",
    )
    require_input(
        f"loss: got {loss.name} for an {kind} head, accepted dflash for DFlash heads and no others; "
        "DSpark and DFlash2 heads are not trained",
        (loss.name == "dflash") == isinstance(head, DflashNet)
        and not getattr(head.config, "rank", 0)
        and not getattr(head.config, "anchored", False)
        and not getattr(head.config, "gemma4", False),
    )
    require_input(
        f"steps: got {loss.steps}, the head predicts {head.config.depths}",
        loss.steps <= head.config.depths,
    )


class UnrolledStep(NamedTuple):
    """One step of the unrolled draft.

    states    [batch, anchors, width, hidden size], recurrent states of the draft
    labels    int64 [batch, anchors, width], rows of `Labels`, or -1 for nodes without a loss
    """

    states: Tensor
    labels: Tensor


class Report(NamedTuple):
    """The loss of a batch.

    loss     a scalar with a gradient
    hits     per step, share of rows whose best token is the target's; None if not measured
    overlap  per step, mean overlap of both distributions (the acceptance rate of sampled drafts); None if not measured
    """

    loss: Tensor
    hits: list[float] | None
    overlap: list[float] | None


def loss_of(
    loss: Loss,
    head: EagleHead,
    teacher: HeadTeacher,
    reading: Reading,
    answers: Tensor,
    *,
    generator: torch.Generator | None = None,
    measure: bool = False,
) -> Report:
    """Return the loss over a batch of sequences of one length.

    reading: of the teacher, with its cache for a loss on a tree; answers: bool [batch, length], true for tokens that
    the draft learns to predict.

    The loss is the mean over positions of the sum over steps and, in a tree, over nodes. Raise InputError if no answer
    is long enough.
    """
    check_fit(loss, head)
    rows = torch.zeros_like(answers[:, 1:])
    rows[:, :-1] = answers[:, 2:]  # row i reads feature i and token i + 1, and predicts token i + 2
    require_input("answers: no answer has a token that a draft could predict", bool(rows.any()))
    anchors = _anchors(rows, loss.anchors, generator)
    labels = Labels(teacher, head)
    steps = _steps(loss, head, teacher, reading, rows, anchors, labels, generator)
    totals, shares = [], []
    for number, step in enumerate(steps):
        chosen = step.labels >= 0
        index = step.labels[chosen]
        positions = max(int(chosen.any(dim=-1).sum()), 1)
        total, *counts = labels.cross_entropy(step.states[chosen], index, loss, measure=measure)
        total = total / positions
        if loss.regression:
            aim = labels.states[index].to(step.states.dtype)
            distances = smooth_l1_loss(
                step.states[chosen].float(), aim.float(), reduction="none"
            ).mean(dim=-1)
            total = total + loss.regression * distances.sum() / positions
        totals.append(total * loss.decay**number)
        shares.append([count / max(len(index), 1) for count in counts])
    hits, overlap = map(list, zip(*shares, strict=True)) if measure else (None, None)
    return Report(torch.stack(totals).sum(), hits, overlap)


def _anchors(rows: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """Return rows from which later steps are unrolled, int64 [batch, anchors], padded with -1."""
    keys = (
        torch.rand(rows.shape, generator=generator, device=rows.device, dtype=torch.float32)
        if share < 1
        else rows.float() + 0.5
    )
    counts = (rows.sum(dim=1) * share).ceil().long()
    order = keys.masked_fill(~rows, -1.0).argsort(dim=1, descending=True, stable=True)[
        :, : int(counts.max())
    ]
    missing = torch.arange(order.shape[1], device=rows.device, dtype=torch.int64) >= counts[:, None]
    # In the order of the text, the missing ones last.
    return order.masked_fill(missing, rows.shape[1]).sort(dim=1).values.masked_fill(missing, -1)


def _steps(
    loss: Loss,
    head: EagleHead,
    teacher: HeadTeacher,
    reading: Reading,
    rows: Tensor,
    anchors: Tensor,
    labels: Labels,
    generator: torch.Generator | None,
) -> Iterator[UnrolledStep]:
    """Yield the first step, of every row, then later steps along the text or along the target's tree."""
    where = _text_labels(labels, reading, rows)
    features = _with_noise(reading.features, loss.noise, generator)
    if isinstance(head, DflashNet):
        yield from _along_blocks(loss, head, teacher, features, reading, anchors, where)
        return
    unrolling = Unrolling(head, teacher, features, reading.tokens, anchors)
    yield UnrolledStep(unrolling.first()[:, :, None], where[:, 1:, None])
    if loss.width:
        yield from _along_tree(loss, teacher, reading, anchors, labels, unrolling)
    else:
        yield from _along_text(loss, reading, anchors, where, unrolling)


def _along_text(
    loss: Loss, reading: Reading, anchors: Tensor, where: Tensor, unrolling: Unrolling
) -> Iterator[UnrolledStep]:
    """Yield the later steps of EAGLE, HASS and the training-time test."""
    for depth in range(1, loss.steps):
        positions = (anchors + 1 + depth).clamp(0, where.shape[1] - 1)
        tokens = reading.tokens.gather(1, positions)[..., None]
        states = unrolling.next(tokens, torch.zeros_like(tokens), detach=loss.detach)
        yield UnrolledStep(states, _labels_ahead(where, anchors, depth))


def _labels_ahead(where: Tensor, anchors: Tensor, depth: int) -> Tensor:
    """Return the labels `depth` tokens after the first of each anchor, -1 beyond the text; [batch, anchors, 1]."""
    positions, length = anchors + 1 + depth, where.shape[1]
    inside = (anchors >= 0) & (positions < length)
    return torch.where(inside, where.gather(1, positions.clamp(0, length - 1)), -1)[..., None]


def _along_blocks(
    loss: Loss,
    head: DflashNet,
    teacher: HeadTeacher,
    features: Tensor,
    reading: Reading,
    anchors: Tensor,
    where: Tensor,
) -> Iterator[UnrolledStep]:
    """Yield the positions of DFlash's blocks, one after the other."""
    states = block_states(head, teacher, features, reading.tokens, anchors)
    for depth in range(loss.steps):
        yield UnrolledStep(states[:, :, depth, None], _labels_ahead(where, anchors, depth))


def block_states(
    head: DflashNet, teacher: HeadTeacher, features: Tensor, tokens: Tensor, anchors: Tensor
) -> Tensor:
    """Return the states of blocks as if the head served at each anchor, [batch, anchors, positions, hidden size].

    A block sees the target's states up to its anchor, and begins with the token after it. features: [batch, length,
    ...]; tokens: int64 [batch, length]; anchors: rows, -1 for none.
    """
    config, count = head.config, anchors.shape[1]
    places = torch.arange(tokens.shape[1] - 1, device=tokens.device, dtype=torch.int64)
    first = anchors.clamp(min=0)[..., None] + 1
    block = tokens.new_full((*anchors.shape, config.block_size), config.mask_token_id)
    block[..., 0] = tokens.gather(1, first[..., 0])
    ahead = torch.arange(config.block_size, device=tokens.device, dtype=torch.int64)
    positions = (first + ahead).flatten(1)
    # of all that a row may see: the text, then the blocks
    at = torch.cat([places.expand(len(tokens), -1), positions], dim=1)[:, None]
    number = torch.arange(len(positions[0]), device=tokens.device, dtype=torch.int64)
    number //= config.block_size
    visible = torch.cat(
        [
            places < first.expand(-1, -1, config.block_size).flatten(1)[..., None],
            (number[:, None] == number).expand(len(tokens), -1, -1),
        ],
        dim=2,
    )
    fused = head.fuse(features[:, :-1].to(head.dtype))
    rotation = head.rope(places, fused.dtype)
    attends = []
    for layer, window, causal in zip(
        cast(Any, head.layers), config.windows, config.causal, strict=True
    ):
        near = at > positions[..., None] - (window or at.shape[2])
        in_sight = visible & near & (at <= positions[..., None]) if causal else visible & near
        context = layer.self_attn.keys_and_values(fused, rotation)
        attends.append(partial(_attend_from_blocks, context, in_sight[:, None]))
    states = head(teacher.embed(head, block.flatten(1)), positions, attends)
    return states.unflatten(1, (count, config.block_size))[:, :, 1:]


def _attend_from_blocks(
    context: tuple[Tensor, Tensor], visible: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attend to a text, whose keys and values are `context`, and to blocks; visible: bool [batch, 1, rows, both]."""
    keys, values = (
        torch.cat([before.to(value.dtype), rows.to(value.dtype)], dim=-2)
        for before, rows in zip(context, (key, value), strict=True)
    )
    return scaled_dot_product_attention(
        query.to(value.dtype), keys, values, visible, enable_gqa=True
    )


def _along_tree(
    loss: Loss,
    teacher: Any,
    reading: Reading,
    anchors: Tensor,
    labels: Labels,
    unrolling: Unrolling,
) -> Iterator[UnrolledStep]:
    """Yield the later steps of TALF. The label of a node of the target's tree is the target's distribution after it."""
    roots = anchors.clamp(min=0) + 1  # positions of the root tokens
    for layer in teacher.grow(reading, roots, width=loss.width, depths=loss.steps - 1):
        index = labels.add(layer.states.flatten(0, 2)).view(layer.tokens.shape)
        states = unrolling.next(layer.tokens, layer.parents, detach=loss.detach)
        yield UnrolledStep(states, torch.where((anchors >= 0)[..., None], index, -1))


def _text_labels(labels: Labels, reading: Reading, rows: Tensor) -> Tensor:
    """Return the row in `labels` of the target's distribution at each position, or -1; int64 [batch, length]."""
    counted = torch.zeros_like(reading.tokens, dtype=torch.bool)
    counted[:, 1:] = rows
    where = torch.full_like(reading.tokens, -1)
    where[counted] = labels.add(reading.states[counted])
    return where


def _with_noise(features: Tensor, width: float, generator: torch.Generator | None) -> Tensor:
    if not width:
        return features
    noise = (
        torch.rand(features.shape, generator=generator, device=features.device, dtype=torch.float32)
        - 0.5
    )
    return features + (noise * (width * NOISE_LENGTH / features.shape[1])).to(features.dtype)


class Unrolling:
    """A draft unrolled from many positions of a text at once, as if it served at each.

    A node at depth d after anchor row r sees the rows up to r, its own ancestors and itself. It is at position r + d
    and reads its parent's output. This is the arithmetic of `drafters.eagle` in a few large passes.
    """

    def __init__(
        self,
        head: EagleHead,
        teacher: HeadTeacher,
        features: Tensor,
        tokens: Tensor,
        anchors: Tensor,
    ) -> None:
        """features: [batch, length, ...]; tokens: int64 [batch, length]; anchors: rows, -1 for none."""
        self._head, self._teacher = head, teacher
        self._features, self._tokens = features, tokens
        self._anchors = anchors.clamp(min=0)
        self._depth = 0
        self._path: list[tuple[Tensor, Tensor]] = []  # keys and values of the last nodes' ancestors

    def first(self) -> Tensor:
        """Return recurrent states of all rows, [batch, length - 1, hidden size]."""
        attend = _Recorded(within(self._head.config.sliding_window))
        tokens = self._tokens[:, 1:]
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64).expand(
            tokens.shape
        )
        hidden = self._head.fuse(self._features[:, :-1].to(self._head.dtype))
        states = self._head(hidden, self._teacher.embed(self._head, tokens), positions, attend)
        self._prefix = attend.key, attend.value
        rows = torch.arange(tokens.shape[0], device=tokens.device, dtype=torch.int64)[:, None]
        self._states = states[rows, self._anchors][:, :, None]
        return states

    def next(self, tokens: Tensor, parents: Tensor, *, detach: bool) -> Tensor:
        """Return recurrent states one depth after the nodes of the last call, [batch, anchors, width, hidden size].

        tokens, parents: int64 [batch, anchors, width]; parents are places among the anchor's last nodes.
        """
        self._depth += 1
        count, width = tokens.shape[1:]
        hidden = _of_parents(self._states.detach() if detach else self._states, parents)
        self._path = [
            (_of_parents(key, parents), _of_parents(value, parents)) for key, value in self._path
        ]
        window = self._head.config.sliding_window
        path = self._path[max(self._depth - window, 0) if window else 0 :]
        begin = (
            self._anchors + (self._depth - window + 1)
            if window
            else torch.zeros_like(self._anchors)
        )
        rows = torch.arange(self._tokens.shape[1] - 1, device=tokens.device, dtype=torch.int64)
        hidden_rows = (rows > self._anchors[..., None]) | (rows < begin[..., None])
        hidden_rows = hidden_rows.repeat_interleave(width, dim=1)[:, None, None]
        attend = _Recorded(partial(_attend_along_paths, self._prefix, path, hidden_rows))
        positions = (self._anchors + self._depth)[:, :, None].expand(tokens.shape)
        embeddings = self._teacher.embed(self._head, tokens.flatten(1))
        states = self._head(hidden.flatten(1, 2), embeddings, positions.flatten(1), attend)
        own = (
            part.transpose(1, 2).unflatten(1, (count, width)) for part in (attend.key, attend.value)
        )
        self._path.append(tuple(own))
        self._states = states.unflatten(1, (count, width))
        return self._states


def _of_parents(states: Tensor, parents: Tensor) -> Tensor:
    """Return the states of each node's parent, [batch, anchors, width, ...]."""
    batch, count, _ = parents.shape
    sequence = torch.arange(batch, device=parents.device, dtype=torch.int64)[:, None, None]
    anchor = torch.arange(count, device=parents.device, dtype=torch.int64)[None, :, None]
    return states[sequence, anchor, parents]


class _Recorded:
    """An attention function that stores the last keys and values, [batch, KV heads, rows, head size]."""

    def __init__(self, attend: Any) -> None:
        self._attend = attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key, self.value = key, value
        return self._attend(query, key, value)


def _attend_along_paths(
    prefix: tuple[Tensor, Tensor],
    path: list[tuple[Tensor, Tensor]],
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attend from nodes to the rows of the prefix that are not hidden, to their ancestors and to themselves."""
    batch, heads, nodes, size = query.shape
    shape = (batch, key.shape[1], heads // key.shape[1], nodes)
    # softmax computes half precision in float32 internally; autocast would copy.
    with torch.autocast(query.device.type, enabled=False):
        query = (query.to(value.dtype) * size**-0.5).view(*shape, size)
        far_key, far_value = (tensor.to(value.dtype) for tensor in prefix)
        near = [*((_per_node(k), _per_node(v)) for k, v in path), (key.to(value.dtype), value)]
        scores = (query.flatten(2, 3) @ far_key.transpose(-1, -2)).view(*shape, -1)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.cat(
            [scores, *((query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in near)], dim=-1
        )
        far, *shares = weights.softmax(dim=-1).split([far_key.shape[-2], *[1] * len(near)], dim=-1)
        out = (far.flatten(2, 3) @ far_value).view(*shape, size)
        for share, (_, v) in zip(shares, near, strict=True):
            out = out + share * v[:, :, None]
        return out.flatten(1, 2)


def _per_node(states: Tensor) -> Tensor:
    """Reshape [batch, anchors, width, KV heads, head size] to [batch, KV heads, anchors * width, head size]."""
    return states.flatten(1, 2).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------- cross-entropy


class Labels:
    """The target's distributions over the draft's vocabulary, added row by row.

    A row whose best token is not in the draft's vocabulary has no loss, as in EAGLE-3, and never counts as a hit.
    """

    def __init__(self, teacher: HeadTeacher, head: EagleHead) -> None:
        self._teacher, self._head = teacher, head
        self._ids = head.target_ids()
        self._states: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._best: list[Tensor] = []
        self._count = 0

    @property
    def states(self) -> Tensor:
        return _joined(self._states)

    @property
    def probabilities(self) -> Tensor:
        """[rows, draft vocabulary]; each row sums to 1."""
        return _joined(self._probabilities)

    @property
    def best(self) -> Tensor:
        """int64 [rows]: the draft's column of the target's best token, or -1 without one."""
        return _joined(self._best)

    @torch.no_grad()
    def add(self, states: Tensor) -> Tensor:
        """Add the target's states after its final norm, [rows, hidden size]. Return their row numbers."""
        for rows in states.split(LABEL_ROWS):
            best, probabilities = self._teacher.labels(rows, self._ids)
            self._best.append(best)
            self._probabilities.append(probabilities)
        self._states.append(states)
        first, self._count = self._count, self._count + len(states)
        return torch.arange(first, self._count, device=states.device, dtype=torch.int64)

    def cross_entropy(
        self, states: Tensor, index: Tensor, loss: Loss, *, measure: bool
    ) -> tuple[Tensor, float, float]:
        """Return the sum over rows of the weighted cross-entropies between these labels and the draft's distributions.

        Then those of rows that are hits, and of their overlap. states: [rows, hidden size], recurrent; index: int64
        [rows], the label of each.
        """
        read = self._head.readout(states)
        layer = self._head.vocabulary_head() or self._teacher.layer
        device = read.device.type
        if torch.is_autocast_enabled(device):
            read = read.to(torch.get_autocast_dtype(device))
        hits = torch.zeros(2, device=read.device, dtype=torch.float32)
        total = _LinearCrossEntropy.apply(
            read, layer.weight, layer.bias, self, index, loss, hits if measure else None
        )
        return total, *hits.tolist()


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) > 1:
        parts[:] = [torch.cat(parts)]
    return parts[0]


class _LinearCrossEntropy(torch.autograd.Function):
    """A linear layer with cross-entropy, chunk by chunk, so that the logits of all rows are never in memory at once.

    The forward pass also computes the gradients, while it has the logits of a chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Labels,
        index: Tensor,
        loss: Loss,
        measured: Tensor | None,
    ) -> Tensor:
        wants = ctx.needs_input_grad
        as_used = weight.to(states.dtype)
        bias_used = None if bias is None else bias.to(states.dtype)
        into_states = torch.empty_like(states) if wants[0] else None
        into_weight = torch.zeros_like(weight) if wants[1] else None
        into_bias = torch.zeros_like(bias) if bias is not None and wants[2] else None
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        probabilities, ids = labels.probabilities, labels.best
        for block in torch.arange(len(states), device=states.device, dtype=torch.int64).split(
            BLOCK
        ):
            slopes = []
            for rows in block.split(
                max(1, CHUNK_VALUES[states.device.type == "cuda"] // len(weight))
            ):
                logits = linear(states[rows], as_used, bias_used).float()
                aim, best = probabilities[index[rows]].float(), ids[index[rows]]
                if measured is not None:
                    measured[0] += (logits.argmax(dim=-1) == best).sum()
                    measured[1] += torch.minimum(logits.softmax(dim=-1), aim).sum()
                aim = _weighted(aim, loss).mul_((best >= 0)[:, None])
                mass = aim.sum(dim=-1, keepdim=True)
                normalizer = logits.logsumexp(dim=-1, keepdim=True)
                total += (normalizer * mass).sum() - torch.linalg.vecdot(aim, logits).sum()
                if any(wants):
                    slopes.append(
                        logits.sub_(normalizer).exp_().mul_(mass).sub_(aim).to(states.dtype)
                    )
            if not slopes:
                continue
            slope = torch.cat(slopes)
            if into_bias is not None:
                into_bias += slope.float().sum(dim=0)
            if into_states is not None:
                into_states[block] = slope @ as_used
            if into_weight is not None:
                into_weight += slope.T @ states[block]
        ctx.save_for_backward(into_states, into_weight, into_bias)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        into = (
            None if saved is None else saved * slope.to(saved.dtype) for saved in ctx.saved_tensors
        )
        return (*into, None, None, None, None)


def _weighted(aim: Tensor, loss: Loss) -> Tensor:
    """Return labels multiplied by the weights of both cross-entropies."""
    if not loss.top_weight:
        return aim if loss.cross_entropy == 1 else aim * loss.cross_entropy
    weights = torch.full_like(aim, loss.cross_entropy)
    top = aim.topk(min(loss.top_k, aim.shape[-1]), dim=-1).indices
    return aim * weights.scatter_(1, top, loss.cross_entropy + loss.top_weight)
