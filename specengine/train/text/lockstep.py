"""Write conversations in lockstep: one forward of the model per position, for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specengine.train.text.conversations import MIN_P, Format, Row, Writer
from specengine.train.text.corpus import Text
from specengine.train.text.options import SynthesisOptions


class Lockstep(Writer):
    """Writes a batch of conversations in lockstep. All rows are at the same position, so nothing is padded."""

    def __init__(self, model: PreTrainedModel, form: Format, options: SynthesisOptions, tokenizer: Any) -> None:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        super().__init__(form, options, tokenizer, vocabulary)
        self.model = model.eval()
        self._no_words = torch.zeros(vocabulary, dtype=torch.bool, device=model.device)
        self._no_words[self.no_words] = True
        self._no_words[len(tokenizer) :] = True  # rows of the head without a token

    @torch.inference_mode()
    def _texts(self, shard: int, prompts: list[list[list[int]]]) -> list[Text]:
        options, device = self.options, self.model.device
        generator = torch.Generator(device).manual_seed(self.seed(shard))
        rows = [self.row(number, shard, prompts, generator) for number in range(options.rows)]
        lead = min(len(row.forced) for row in rows)
        inputs = torch.tensor([[row.take() for _ in range(lead)] for row in rows], device=device, dtype=torch.int64)
        cache = _lockstep_cache(self.model, options.length)
        for position in range(lead, options.length):
            logits = self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            drawn = self._draw(logits, rows, generator).tolist()
            inputs = torch.tensor(
                [[row.advance(token, options.length - position)] for row, token in zip(rows, drawn, strict=True)],
                device=device,
                dtype=torch.int64,
            )
            if all(row.done for row in rows):
                break
        return [row.text() for row in rows]

    def _draw(self, logits: Tensor, rows: list[Row], generator: torch.Generator) -> Tensor:
        """Return each row's next token at its temperature, int64 [rows]."""
        device = logits.device
        users = torch.tensor([row.asks for row in rows], device=device, dtype=torch.bool)
        if users.any():  # a user's turn has at least one word, and no markup in it
            first = torch.tensor([row.asks and not row.words for row in rows], device=device, dtype=torch.bool)
            banned = self._no_words & users[:, None]
            stops = torch.tensor(sorted(self.form.stops), dtype=torch.int64, device=device)
            banned[:, stops] &= first[:, None]
            logits = logits.masked_fill(banned, float("-inf"))
        best = logits.argmax(dim=-1)
        temperatures = torch.tensor([row.temperature_now for row in rows], device=device, dtype=torch.float32)
        drawing = temperatures.nonzero()[:, 0]
        if len(drawing):
            best[drawing] = _sample(logits[drawing], temperatures[drawing], generator)
        return best


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    probabilities = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    probabilities[probabilities < MIN_P * probabilities.amax(dim=-1, keepdim=True)] = 0
    cumulated = probabilities.cumsum(dim=-1)
    noise = torch.rand(len(logits), 1, generator=generator, device=logits.device, dtype=torch.float32)
    # To the right of the drawn value, so that a token without probability is never chosen.
    drawn = torch.searchsorted(cumulated, noise * cumulated[:, -1:], right=True)[:, 0]
    return torch.minimum(drawn, (cumulated < cumulated[:, -1:]).sum(dim=-1))


def _lockstep_cache(model: PreTrainedModel, length: int) -> DynamicCache:
    """Return transformers' cache. Layers that only grow have room for `length` tokens from the start."""
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number] = _RoomyLayer(length)
    return cache


class _RoomyLayer(DynamicLayer):
    """Keys and values as views of buffers with room for all positions. Appending copies nothing."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = tuple(  # type: ignore[assignment]
                states.new_empty(*states.shape[:2], self._length, states.shape[3])
                for states in (key_states, value_states)
            )
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        for buffer, states in zip(self._buffers or (), (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self._buffers or ())
        return self.keys, self.values
