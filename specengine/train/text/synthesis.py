"""Training text without a data set: the target writes the user's turns and answers them.

A chat model, shown the bare beginning of a user's turn, goes on as the users of its own training did; its answers
are then exactly the text that a draft has to predict. A base model continues a single random token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specengine.errors import InputError
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.options import SynthesisOptions

# By row of a batch, in turn. Greedy answers are what a draft meets most; the others keep it from knowing only those.
ANSWER_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
USER_TEMPERATURE = 1.0
MIN_P = 0.02  # tokens below this share of the best one's probability are not drawn
ROOM_FOR_A_TURN = 0.3  # of the length: with less left, a conversation ends with its answer
LONGEST_QUESTION = 0.5  # of the length; a user's turn is ended there
BASE_LEAD = 8  # tokens of a base model's text that are drawn at temperature 1, so that greedy rows differ


@dataclass(frozen=True)
class Format:
    """The chat template as token ids around what is said; a base model has only the `before` of each text.

    before        the user's first words
    to_answer     from the user's last word to the answer's first
    to_user       from the answer's last word to the user's next
    stops         tokens that end a turn
    """

    before: list[int]
    to_answer: list[int] = field(default_factory=list)
    to_user: list[int] = field(default_factory=list)
    stops: frozenset[int] = frozenset()

    @property
    def chat(self) -> bool:
        return bool(self.to_answer)

    @classmethod
    def of(cls, tokenizer: Any, stops: frozenset[int]) -> Format:
        """Read off the tokenizer's chat template."""
        if not getattr(tokenizer, "chat_template", None):
            return cls(list(tokenizer("")["input_ids"]), stops=stops)
        marks = ["\u2042first\u2042", "\u2042second\u2042", "\u2042third\u2042"]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        question = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        dialogue = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        try:
            before, to_answer = question.split(marks[0])
            to_user = dialogue.split(marks[1])[1].split(marks[2])[0]
        except (ValueError, IndexError) as error:
            raise InputError("target: its chat template does not show what was said as it was said") from error
        parts = (before, to_answer, to_user)
        first, second, third = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
        return cls(first, second, third, stops | {second[0], third[0]})


def write_corpus(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    options: SynthesisOptions,
    *,
    name: str,
    prompts: Sequence[Sequence[str]] = (),
    part: tuple[int, int] = (0, 1),
    progress: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Let `model` write training text into `folder` until there are `options.tokens` tokens.

    Interrupted at any point it goes on behind the last whole shard, and ends with the same text. prompts: the users'
    turns of conversations to be mixed in. part: (i, n), write only every n-th shard from the i-th on, and an n-th of
    the tokens, for n such calls at a time into one folder. InputError where `folder` was begun otherwise.
    """
    index, parts = part
    if not 0 <= index < parts:
        raise InputError(f"part: got {index} of {parts}, accepted 0 to {parts - 1}")
    form = Format.of(tokenizer, stop_tokens(model, tokenizer))
    given = [ids for ids in (_as_turns(turns, form, tokenizer) for turns in prompts) if len(ids[0]) < options.length]
    if prompts and not given:
        raise InputError(f"prompts: each is longer than the length of {options.length} tokens")
    if not form.chat and len(form.before) + 1 >= options.length:
        raise InputError(f"length: got {options.length}, the beginning of a text alone has {len(form.before)} tokens")
    manifest = {"target": name, "vocab_size": model.get_input_embeddings().weight.shape[0], "prompts": len(given)}
    settings = {field: value for field, value in asdict(options).items() if field != "tokens"}  # there may be more
    corpus = Corpus.create(folder, manifest | settings)
    writer = _Writer(model, form, options, tokenizer)
    number, have, began = index, 0, time.perf_counter()
    written = 0
    while have * parts < options.tokens:
        if not corpus.shard(number).is_file():
            texts = writer.write(number, given)
            corpus.add(number, texts)
            written += sum(len(text.tokens) for text in texts)
        have += sum(len(text.tokens) for text in corpus.read(number))
        rate = written / (time.perf_counter() - began)
        share = min(1.0, have * parts / options.tokens)
        progress(f"{have:,} tokens written ({share:.0%}), {rate:.0f} per second")
        number += parts
    return corpus


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a sequence, by the model's generation config and the tokenizer."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    ids = [ends] if isinstance(ends, int) else list(ends or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)


def _as_turns(turns: Sequence[str], form: Format, tokenizer: Any) -> list[list[int]]:
    """The ids of each user's turn with what stands around it."""
    plain = [list(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in turns]
    first, *later = plain
    return [form.before + first + form.to_answer, *(form.to_user + turn + form.to_answer for turn in later)]


class _Writer:
    """Writes a batch of conversations in lockstep: all rows stand at the same position, so nothing is padded."""

    def __init__(self, model: PreTrainedModel, form: Format, options: SynthesisOptions, tokenizer: Any) -> None:
        self.model, self.form, self.options = model.eval(), form, options
        special = set(tokenizer.all_special_ids) | form.stops
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._ordinary = [i for i in range(min(vocabulary, len(tokenizer))) if i not in special]
        self._no_words = torch.zeros(vocabulary, dtype=torch.bool, device=model.device)
        self._no_words[sorted(i for i in special if i < vocabulary)] = True
        self._no_words[len(tokenizer) :] = True  # rows of the head that no token has

    @torch.inference_mode()
    def write(self, shard: int, given: list[list[list[int]]]) -> list[Text]:
        """The conversations of a shard, longest `options.length`; without those that never came to an answer."""
        options, device = self.options, self.model.device
        generator = torch.Generator(device).manual_seed(options.seed * 1_000_003 + shard)
        rows = [self._row(number, shard, given, generator) for number in range(options.rows)]
        lead = min(len(row.forced) for row in rows)
        inputs = torch.tensor([[row.take() for _ in range(lead)] for row in rows], device=device)
        cache = _lockstep_cache(self.model, options.length)
        for position in range(lead, options.length):
            logits = self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            drawn = self._draw(logits, rows, generator).tolist()
            inputs = torch.tensor(
                [[row.advance(token, options.length - position)] for row, token in zip(rows, drawn, strict=True)],
                device=device,
            )
            if all(row.done for row in rows):
                break
        texts = [row.text() for row in rows]
        return [text for text in texts if text.answers.any()]

    def _row(self, number: int, shard: int, given: list[list[list[int]]], generator: torch.Generator) -> _Row:
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        if given and number < self.options.prompt_share * self.options.rows:
            turns = given[(shard * self.options.rows + number) % len(given)]
            return _Row(self.form, self.options.length, temperature, turns)
        begin = list(self.form.before)
        if not self.form.chat:
            pick = torch.randint(len(self._ordinary), (), generator=generator, device=generator.device)
            begin.append(self._ordinary[int(pick)])
        return _Row(self.form, self.options.length, temperature, [begin])

    def _draw(self, logits: Tensor, rows: list[_Row], generator: torch.Generator) -> Tensor:
        """int64 [rows]: each row's next token at its temperature; greedy rows take the best."""
        device = logits.device
        users = torch.tensor([row.asks for row in rows], device=device)
        if users.any():  # a user's turn has at least one word, and no markup in it
            first = torch.tensor([row.asks and not row.words for row in rows], device=device)
            banned = self._no_words & users[:, None]
            stops = torch.tensor(sorted(self.form.stops), dtype=torch.int64, device=device)
            banned[:, stops] &= first[:, None]
            logits = logits.masked_fill(banned, float("-inf"))
        best = logits.argmax(dim=-1)
        temperatures = torch.tensor([row.temperature_now for row in rows], device=device)
        drawing = temperatures.nonzero()[:, 0]
        if len(drawing):
            best[drawing] = _sample(logits[drawing], temperatures[drawing], generator)
        return best


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    probabilities = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    probabilities[probabilities < MIN_P * probabilities.amax(dim=-1, keepdim=True)] = 0
    cumulated = probabilities.cumsum(dim=-1)
    noise = torch.rand(len(logits), 1, generator=generator, device=logits.device)
    # Right of the drawn height, so that a token without probability is never hit.
    found = torch.searchsorted(cumulated, noise * cumulated[:, -1:], right=True)[:, 0]
    return torch.minimum(found, (cumulated < cumulated[:, -1:]).sum(dim=-1))


class _Row:
    """One conversation while it is written."""

    def __init__(self, form: Format, length: int, temperature: float, turns: list[list[int]]) -> None:
        self.form, self.length, self.temperature = form, length, temperature
        self.forced = deque(turns[0])  # tokens that come before anything is drawn
        self.turns = deque(turns[1:])  # of a given conversation
        self.given = form.chat and turns[0][-len(form.to_answer) :] == form.to_answer
        self.asks = form.chat and not self.given
        self.words = 0  # drawn in this turn
        self.done = False
        self.tokens: list[int] = []
        self.answers: list[bool] = []

    @property
    def temperature_now(self) -> float:
        if self.forced or self.done:
            return 0.0
        lead = not self.form.chat and self.words < BASE_LEAD
        return USER_TEMPERATURE if self.asks or lead else self.temperature

    def take(self) -> int:
        """The next of the forced tokens."""
        return self._keep(self.forced.popleft(), answer=False)

    def advance(self, drawn: int, left: int) -> int:
        """The token at the next position, of which there are `left`: a forced one, or the one that was drawn."""
        if self.done:
            return drawn
        if self.forced:
            return self.take()
        if self.asks:
            return self._ask(drawn)
        self.words += 1
        if drawn in self.form.stops:
            self._end_answer(drawn, left)
        return self._keep(drawn, answer=True)

    def _ask(self, drawn: int) -> int:
        if self.words and (drawn in self.form.stops or self.words >= LONGEST_QUESTION * self.length):
            self.asks, self.words = False, 0
            self.forced.extend(self.form.to_answer)
            return self.take()
        self.words += 1
        return self._keep(drawn, answer=False)

    def _end_answer(self, drawn: int, left: int) -> None:
        rest = self.form.to_user[1:] if self.form.to_user[:1] == [drawn] else self.form.to_user
        self.words = 0
        if self.turns:
            turn = self.turns.popleft()
            self.forced.extend(turn[len(self.form.to_user) - len(rest) :])
        elif self.form.chat and not self.given and left > ROOM_FOR_A_TURN * self.length:
            self.forced.extend(rest)
            self.asks = True
        else:
            self.done = True

    def _keep(self, token: int, *, answer: bool) -> int:
        self.tokens.append(token)
        self.answers.append(answer)
        return token

    def text(self) -> Text:
        return Text(torch.tensor(self.tokens, dtype=torch.int32), torch.tensor(self.answers))


def _lockstep_cache(model: PreTrainedModel, length: int) -> DynamicCache:
    """transformers' cache, with room for `length` tokens from the start where its layers only ever grow."""
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[number] = _RoomyLayer(length)
    return cache


class _RoomyLayer(DynamicLayer):
    """Keys and values as views of buffers that have room for all positions; appending copies nothing."""

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
