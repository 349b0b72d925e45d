"""Write training text without a data set: the target writes the user's turns and answers them.

A chat model that is prompted with the bare beginning of a user's turn continues like the users in its training data.
Its answers are the text that a draft has to predict. A base model continues a single random token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specengine.errors import InputError, require
from specengine.train.text.conversations import MIN_P, ChatFormat, Row, Writer, as_turns
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.options import SynthesisOptions

if TYPE_CHECKING:
    from specengine.engine import Engine

# Neutral values, whatever the model's own config has.
NEUTRAL = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def write_corpus(
    source: PreTrainedModel | Engine,
    tokenizer: Any,
    folder: Path,
    options: SynthesisOptions,
    *,
    name: str,
    prompts: Sequence[Sequence[str]] = (),
    part: tuple[int, int] = (0, 1),
    progress: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Let a model write training text into `folder` until it has `options.tokens` tokens.

    source: a model writes all conversations of a shard in lockstep; an engine (with this tokenizer) writes one at a
    time, as it answers its users.
    prompts: users' turns of conversations to mix in.
    part: (i, n), write only every n-th shard from the i-th on, and an n-th of the tokens, for n parallel calls.

    After an interruption, the same call resumes after the last complete shard and ends with the same text. Raise
    InputError if `folder` was begun with other settings.
    """
    index, parts = part
    require("part", f"{index} of {parts}", f"0 to {parts - 1}", 0 <= index < parts)
    form = ChatFormat.of(tokenizer, stop_tokens(source, tokenizer))
    turn_ids = [ids for ids in (as_turns(turns, form, tokenizer) for turns in prompts) if len(ids[0]) < options.length]
    if prompts and not turn_ids:
        raise InputError(f"prompts: each is longer than the length of {options.length} tokens")
    if not form.chat and len(form.before) + 1 >= options.length:
        raise InputError(f"length: got {options.length}, but the beginning of a text has {len(form.before)} tokens")
    manifest: dict[str, Any] = {"target": name, "prompts": len(turn_ids)}
    writer: Writer
    if isinstance(source, PreTrainedModel):
        writer = Lockstep(source, form, options, tokenizer)
        manifest["vocab_size"] = source.get_input_embeddings().weight.shape[0]
    else:
        writer = Speculative(source, form, options)
        manifest |= {"vocab_size": source.target.vocab_size, "writer": "engine"}
    settings = {field: value for field, value in asdict(options).items() if field != "tokens"}  # a folder may grow
    corpus = Corpus.create(folder, manifest | settings)
    number, have, began = index, 0, time.perf_counter()
    written = 0
    while have * parts < options.tokens:
        if not corpus.shard(number).is_file():
            texts = _written(writer, number, turn_ids, have, progress)
            corpus.add(number, texts)
            written += sum(len(text.tokens) for text in texts)
        have += sum(len(text.tokens) for text in corpus.read(number))
        rate = written / (time.perf_counter() - began)
        share = min(1.0, have * parts / options.tokens)
        progress(f"{have:,} tokens written ({share:.0%}), {rate:.0f} per second")
        number += parts
    return corpus


def _written(writer: Writer, number: int, turns: Any, have: int, progress: Callable[[str], None]) -> list[Any]:
    """Return the texts of a shard. Says when the first one begins, which takes longest, and where Ctrl-C came."""
    if not have:
        progress("Writing the first shard; a line follows each")
    try:
        return list(writer.write(number, turns))
    except KeyboardInterrupt:
        progress(f"Stopped at {have:,} tokens; the shard under way is lost, the others stay")
        raise


def stop_tokens(source: PreTrainedModel | Engine, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a sequence, from the model's generation config and the tokenizer."""
    config = source.generation_config if isinstance(source, PreTrainedModel) else source.target.generation_config
    ends = config.eos_token_id if config else None
    ids = [ends] if isinstance(ends, int) else list(ends or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)


# ---- writers


class Lockstep(Writer):
    """Writes a batch of conversations in lockstep. All rows are at the same position, so nothing is padded."""

    def __init__(self, model: PreTrainedModel, form: ChatFormat, options: SynthesisOptions, tokenizer: Any) -> None:
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


class Speculative(Writer):
    """Writes one conversation at a time, as the engine answers its users, with its own draft and policy.

    Faster with few threads and long prompts.
    """

    def __init__(self, engine: Engine, form: ChatFormat, options: SynthesisOptions) -> None:
        super().__init__(form, options, engine.tokenizer, engine.target.vocab_size)
        self.engine = engine
        unnamed = range(len(engine.tokenizer), engine.target.vocab_size)  # rows of the head without a token
        self._suppressed = [i for i in [*self.no_words, *unnamed] if i not in form.stops]

    def _texts(self, shard: int, prompts: list[list[list[int]]]) -> list[Text]:
        generator = torch.Generator().manual_seed(self.seed(shard))
        rows = [self.row(number, shard, prompts, generator) for number in range(self.options.rows)]
        for number, row in enumerate(rows):
            self._fill(row, self.seed(shard) * self.options.rows + number)
        return [row.text() for row in rows]

    def _fill(self, row: Row, seed: int) -> None:
        length = self.options.length
        while not row.done and len(row.tokens) < length:
            if row.forced:
                row.take()
                continue
            for token in self._drawn(row, seed):
                row.advance(token, length - len(row.tokens))

    def _drawn(self, row: Row, seed: int) -> list[int]:
        """Return tokens until the turn ends, the temperature changes, or the row is full."""
        options: dict[str, Any] = {
            "max_new_tokens": min(row.max_words, self.options.length - len(row.tokens)),
            "temperature": row.temperature_now,
            "eos_token_id": sorted(self.form.stops),
            **NEUTRAL,
        }
        if row.temperature_now:
            options |= {"seed": seed, "min_p": MIN_P}
        if row.asks:  # a user's turn has at least one word, and no markup in it
            options |= {"suppress_tokens": self._suppressed, "min_new_tokens": 1}
        return self.engine.generate(row.tokens, **options).token_ids
