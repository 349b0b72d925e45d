"""The target as a teacher: its hidden states, its distributions, and its own draft trees."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specengine.errors import require_supported
from specengine.models.eagle import EagleHead, embed_for
from specengine.train.text.corpus import Text


class Reading(NamedTuple):
    """One pass of the target over a batch of sequences.

    tokens    int64 [batch, length]
    features  [batch, length, features * hidden size], the hidden states that the draft reads
    states    [batch, length, hidden size], after the final norm
    cache     keys and values, if requested
    """

    tokens: Tensor
    features: Tensor
    states: Tensor
    cache: DynamicCache | None


class TargetLayer(NamedTuple):
    """Tree nodes of one depth, `width` for each anchor.

    tokens   int64 [batch, anchors, width]
    parents  int64 [batch, anchors, width], the parent's index among the anchor's nodes one depth above
    states   [batch, anchors, width, hidden size] of the target at the nodes, after the final norm
    """

    tokens: Tensor
    parents: Tensor
    states: Tensor


class HeadTeacher(ABC):
    """A target whose `Reading.states` its language-model head reads.

    model  a PreTrainedModel or a NativeLM
    head   returns logits [rows, vocabulary] of states after the final norm, [rows, hidden size]
    layer  the linear layer that it is
    """

    model: Any
    device: torch.device
    head: Any

    @property
    def layer(self) -> nn.Linear:
        return cast(nn.Linear, self.head)

    @abstractmethod
    def embed(self, head: EagleHead, tokens: Tensor) -> Tensor:
        """Return token embeddings as the head reads them, [..., hidden size]."""

    @abstractmethod
    def read(self, tokens: Tensor, *, keep_cache: bool = False) -> Reading:
        """Run whole sequences without padding. tokens: int64 [batch, length]."""

    def read_text(self, text: Text) -> Reading:
        return self.read(text.tokens.long().to(self.device)[None])

    def read_batch(
        self, tokens: Tensor, pieces: Sequence[Sequence[Text]], *, keep_cache: bool = False
    ) -> Reading:
        """Return the reading of sequences. tokens: int64 [batch, length]; pieces: the texts that each is made of."""
        return self.read(tokens, keep_cache=keep_cache)

    def labels(self, states: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what a draft is to predict at each row of `Reading.states`, [rows, ...].

        ids: of the draft's vocabulary; None: the target's. Returns the column of the target's best token, int64 [rows],
        -1 where the draft does not have it, and probabilities [rows, draft vocabulary], each row summing to 1.
        """
        logits = self.head(states)
        highest = logits.amax(dim=-1)
        if ids is not None:
            logits = logits[:, ids]
        best = logits.max(dim=-1)
        return torch.where(best.values == highest, best.indices, -1), logits.float().softmax(
            dim=-1
        ).to(states.dtype)


class ServingTeacher(HeadTeacher):
    """Read texts as the target serves them, one at a time, with the states and distributions that its draft meets."""

    def __init__(self, target: Any, feature_ids: tuple[int, ...]) -> None:
        self._target, self._ids = target, (*feature_ids, target.lm.layers)
        self.device, self.model = target.device, target.lm

    def head(self, states: Tensor) -> Tensor:
        return self.model.head(states)

    def embed(self, head: EagleHead, tokens: Tensor) -> Tensor:
        return embed_for(head, self.model, tokens.flatten()).view(*tokens.shape, -1)

    def read(self, tokens: Tensor, *, keep_cache: bool = False) -> Reading:
        """Run one text, int64 [1, length]. Its keys and values are not kept."""
        with torch.inference_mode():
            self._target.reset()
            self._target.want(self._ids)
            states = self._target.prefill(tokens[0].tolist(), 0)
            self._target.reset()
        states = states[None].clone()  # no tensor of inference mode
        size = states.shape[-1] // len(self._ids)
        return Reading(tokens, states[..., :-size], states[..., -size:], None)


class StoredTeacher(ServingTeacher):
    """Read the states that were kept when the target wrote the texts, each by itself; it is not run again.

    The `states` of its readings are the likeliest next tokens and their log-probabilities, float32 [..., 2 * count].
    """

    def __init__(
        self, target: Any, feature_ids: tuple[int, ...], vocabulary: Callable[[], Tensor]
    ) -> None:
        """vocabulary: returns the rows of the target's head, of which its logits are the products."""
        super().__init__(target, feature_ids)
        self._vocabulary = vocabulary

    @functools.cached_property
    def layer(self) -> nn.Linear:
        weight = nn.Parameter(self._vocabulary(), requires_grad=False)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = weight
        return layer

    def read_text(self, text: Text) -> Reading:
        return self.read_batch(text.tokens.long()[None], [[text]])

    def read_batch(
        self, tokens: Tensor, pieces: Sequence[Sequence[Text]], *, keep_cache: bool = False
    ) -> Reading:
        states = [[text.states for text in texts if text.states is not None] for texts in pieces]
        features = torch.stack([torch.cat([piece.features for piece in row]) for row in states])
        top = torch.stack(
            [
                torch.cat([torch.cat([piece.ids, piece.logs.float()], 1) for piece in row])
                for row in states
            ]
        )
        return Reading(tokens, features, top, None)

    def labels(self, states: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens, logs = states.chunk(2, dim=-1)
        vocabulary = (
            torch.arange(self.model.vocab_size, dtype=torch.int64, device="cpu")
            if ids is None
            else ids
        )
        columns = torch.searchsorted(vocabulary, tokens.long()).clamp(max=len(vocabulary) - 1)
        inside = vocabulary[columns] == tokens
        chances = logs.exp() * inside
        probabilities = torch.zeros(len(states), len(vocabulary), dtype=torch.float32, device="cpu")
        probabilities.scatter_add_(
            1, columns, chances / chances.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        )
        return torch.where(inside[:, 0], columns[:, 0], -1), probabilities.to(torch.bfloat16)


class Teacher(HeadTeacher):
    """A frozen target. feature_ids: indices into transformers' `hidden_states` that the draft reads."""

    def __init__(self, model: PreTrainedModel, feature_ids: tuple[int, ...]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_decoder()  # the model without its language-model head
        self.feature_ids = feature_ids
        self.layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._check_head()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.model.get_input_embeddings().weight.device

    @property
    def head(self) -> torch.nn.Linear:
        """The language-model head, which reads states after the final norm."""
        return self.model.get_output_embeddings()

    def embed(self, head: EagleHead, tokens: Tensor) -> Tensor:
        of_head = head.config.own_embeddings
        return nn.functional.embedding(
            tokens, (head.embed_tokens if of_head else self.model.get_input_embeddings()).weight
        ).to(head.dtype)

    @torch.no_grad()
    def read(self, tokens: Tensor, *, keep_cache: bool = False) -> Reading:
        """Run whole sequences without padding. tokens: int64 [batch, length]."""
        cache = DynamicCache(config=self.model.config) if keep_cache else None
        with torch.autocast(self.device.type, enabled=False):
            out = self.decoder(
                input_ids=tokens,
                past_key_values=cache,
                use_cache=keep_cache,
                output_hidden_states=True,
            )
        features = torch.cat([out.hidden_states[i] for i in self.feature_ids], dim=-1)
        return Reading(tokens, features, out.hidden_states[-1], cache)

    @torch.no_grad()
    def grow(
        self, reading: Reading, anchors: Tensor, *, width: int, depths: int
    ) -> list[TargetLayer]:
        """Return the target's own beam tree after each anchor, one TargetLayer per depth from 1 (SALF & TALF, Alg. 1).

        anchors: int64 [batch, anchors], positions of root tokens. Every depth keeps the `width` nodes with the
        largest path probability among the children of the depth above. The cache of `reading` cannot be used again.
        """
        rows = torch.arange(anchors.shape[0], device=anchors.device, dtype=torch.int64)[:, None]
        states = reading.states[rows, anchors][:, :, None]
        scores = states.new_zeros(*anchors.shape, 1, dtype=torch.float32)
        branches = Branches(self, reading, anchors)
        layers: list[TargetLayer] = []
        with torch.autocast(self.device.type, enabled=False):
            for _ in range(depths):
                parents, tokens, scores = self._best_children(states, scores, width)
                states = branches.extend(tokens, parents)
                layers.append(TargetLayer(tokens, parents, states))
        return layers

    def _best_children(
        self, states: Tensor, scores: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return parents, tokens and log path probabilities [batch, anchors, width] of the most likely children."""
        top = [_top(self.head(rows).float(), width) for rows in states.flatten(0, 2).split(256)]
        log_probabilities, tokens = (
            torch.cat(list(parts)).view(*states.shape[:3], width)
            for parts in zip(*top, strict=True)
        )
        joint = (scores[..., None] + log_probabilities).flatten(2)
        best = joint.topk(width, dim=-1)
        return best.indices // width, tokens.flatten(2).gather(2, best.indices), best.values

    @torch.no_grad()
    def _check_head(self) -> None:
        """Raise UnsupportedModelError if the logits are not the head's output, which the losses read."""
        token = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        out, logits = (
            self.decoder(input_ids=token, output_hidden_states=True),
            self.model(input_ids=token).logits,
        )
        require_supported(
            f"target: it has {len(out.hidden_states)} hidden states, {self.layers + 1} are needed, and the draft "
            f"reads {', '.join(map(str, self.feature_ids))}",
            len(out.hidden_states) == self.layers + 1
            and all(0 <= i <= self.layers for i in self.feature_ids),
        )
        require_supported(
            "target: its logits are not those of its head on the last hidden state (a soft cap or a scale); "
            "training a draft for such a model is not supported",
            torch.allclose(
                self.head(out.hidden_states[-1]).float(), logits.float(), rtol=0.01, atol=0.01
            ),
        )


class Branches:
    """Trees of tokens after many positions of one text, run by the target one depth at a time.

    A node sees the text up to its anchor, its own ancestors and itself. The cache of `reading` cannot be used again.
    """

    def __init__(self, teacher: Teacher, reading: Reading, anchors: Tensor) -> None:
        """anchors: int64 [batch, anchors], positions of the roots."""
        assert reading.cache is not None
        self._teacher, self._cache, self._anchors = teacher, reading.cache, anchors
        # bool [batch, anchors, 1, length]: the text that an anchor's nodes see
        self._text = (
            torch.arange(reading.tokens.shape[1], device=anchors.device, dtype=torch.int64)
            <= anchors[..., None]
        )[:, :, None]
        self._lineage: Tensor | None = None  # bool [batch, anchors, width, depth, width]: ancestors

    @torch.no_grad()
    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return states after the final norm, [batch, anchors, width, hidden size], of nodes one depth further.

        tokens, parents: int64 [batch, anchors, width], of the same width at every depth. Parents are indices among the
        anchor's last nodes.
        """
        batch, count, width = tokens.shape
        diagonal = torch.eye(width, dtype=torch.bool, device=tokens.device)[:, None].expand(
            batch, count, width, 1, width
        )
        if self._lineage is not None:
            above = parents[..., None, None].expand(-1, -1, -1, *self._lineage.shape[3:])
            diagonal = torch.cat([self._lineage.gather(2, above), diagonal], dim=3)
        self._lineage = diagonal
        depth = diagonal.shape[3]
        # Columns after the text: depth by depth, anchor by anchor. A node only sees columns of its own anchor.
        mine = torch.eye(count, dtype=torch.bool, device=tokens.device)[
            None, :, None, None, :, None
        ]
        nodes = (diagonal[:, :, :, :, None] & mine).reshape(
            batch, count * width, depth * count * width
        )
        text = self._text.expand(-1, -1, width, -1).reshape(batch, count * width, -1)
        mask = torch.cat([text, nodes], dim=-1)[:, None]
        dtype = self._teacher.model.dtype
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(dtype).min
        )
        out = self._teacher.decoder(
            input_ids=tokens.flatten(1),
            position_ids=(self._anchors + depth)[:, :, None].expand(-1, -1, width).flatten(1),
            attention_mask=additive,
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=True,
        )
        return out.hidden_states[-1].view(batch, count, width, -1)


def _top(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = logits.topk(count, dim=-1)
    return best.values - logits.logsumexp(dim=-1, keepdim=True), best.indices
