"""Write training text without a data set: the target writes the user's turns and answers them.

A chat model that is prompted with the bare beginning of a user's turn continues like the users in its training data.
Its answers are the text that a draft has to predict. A base model continues a single random token.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specengine.errors import InputError, require
from specengine.request.templates import filled
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.options import SynthesisOptions

if TYPE_CHECKING:
    from specengine.engine import Engine


# Temperatures of the rows of a batch, in turn. A draft meets greedy answers most; the others add variety.
ANSWER_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
USER_TEMPERATURE = 1.0
MIN_P = 0.02  # tokens below this share of the best token's probability are not drawn
TURN_ROOM = 0.3  # share of the length: with less room, a conversation ends with its answer
QUESTION_LIMIT = 0.5  # share of the length at which a user's turn is ended
BASE_LEAD = 8  # first tokens of a base model's text, drawn at temperature 1 so that greedy rows differ


@dataclass(frozen=True)
class ChatFormat:
    """The token ids of a chat template around the turns. A base model has only `before`.

    before        ids before the user's first turn
    to_answer     ids between a user's turn and the answer
    to_user       ids between an answer and the user's next turn
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
    def of(cls, tokenizer: Any, stops: frozenset[int]) -> ChatFormat:
        """Return the format of a tokenizer's chat template. Raise InputError if the template changes the turns."""
        if not getattr(tokenizer, "chat_template", None):
            return cls(list(tokenizer("")["input_ids"]), stops=stops)
        marks = ["\u2042first\u2042", "\u2042second\u2042", "\u2042third\u2042"]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        question = filled(tokenizer, messages[:1], add_generation_prompt=True)
        dialogue = filled(tokenizer, messages, add_generation_prompt=True)
        try:
            before, to_answer = question.split(marks[0])
            to_user = dialogue.split(marks[1])[1].split(marks[2])[0]
        except (ValueError, IndexError) as error:
            raise InputError("target: its chat template changes the text of the turns") from error
        texts = (before, to_answer, to_user)
        first, second, third = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        return cls(first, second, third, stops | {second[0], third[0]})


def as_turns(turns: Sequence[str], form: ChatFormat, tokenizer: Any) -> list[list[int]]:
    """Return the ids of each user's turn with the ids of the chat template around it."""
    plain = [list(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in turns]
    first, *later = plain
    return [form.before + first + form.to_answer, *(form.to_user + turn + form.to_answer for turn in later)]


class Writer(ABC):
    """Writes conversations of a format, up to `options.length` tokens long, in shards of `options.rows`."""

    def __init__(self, form: ChatFormat, options: SynthesisOptions, tokenizer: Any, vocab_size: int) -> None:
        self.form, self.options = form, options
        special = set(tokenizer.all_special_ids) | form.stops
        self.no_words = sorted(i for i in special if i < vocab_size)
        self._ordinary = [i for i in range(min(vocab_size, len(tokenizer))) if i not in special]

    def write(self, shard: int, prompts: list[list[list[int]]]) -> list[Text]:
        """Return the texts of a shard that have an answer. prompts: users' turns of conversations to mix in."""
        return [text for text in self._texts(shard, prompts) if text.answers.any()]

    @abstractmethod
    def _texts(self, shard: int, prompts: list[list[list[int]]]) -> list[Text]: ...

    def seed(self, shard: int) -> int:
        return self.options.seed * 1_000_003 + shard

    def row(self, number: int, shard: int, prompts: list[list[list[int]]], generator: torch.Generator) -> Row:
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        if prompts and number < self.options.prompt_share * self.options.rows:
            turns = prompts[(shard * self.options.rows + number) % len(prompts)]
            return Row(self.form, self.options.length, temperature, turns)
        begin = list(self.form.before)
        if not self.form.chat:
            pick = torch.randint(
                len(self._ordinary), (), generator=generator, device=generator.device, dtype=torch.int64
            )
            begin.append(self._ordinary[int(pick)])
        return Row(self.form, self.options.length, temperature, [begin])


class Row:
    """One conversation while it is written."""

    def __init__(self, form: ChatFormat, length: int, temperature: float, turns: list[list[int]]) -> None:
        self.form, self.length, self.temperature = form, length, temperature
        self.forced = deque(turns[0])  # tokens to append before any is drawn
        self.turns = deque(turns[1:])  # later turns of a prompt
        self.prompted = form.chat and turns[0][-len(form.to_answer) :] == form.to_answer
        self.asks = form.chat and not self.prompted
        self.words = 0  # tokens drawn in this turn
        self.done = False
        self.tokens: list[int] = []
        self.answers: list[bool] = []

    @property
    def leads(self) -> bool:
        return not self.form.chat and self.words < BASE_LEAD

    @property
    def temperature_now(self) -> float:
        if self.forced or self.done:
            return 0.0
        return USER_TEMPERATURE if self.asks or self.leads else self.temperature

    @property
    def max_words(self) -> int:
        """Maximum number of tokens to draw at this temperature, apart from the limit on the length."""
        if self.asks:
            return max(1, math.ceil(QUESTION_LIMIT * self.length) - self.words)
        return BASE_LEAD - self.words if self.leads else self.length

    def take(self) -> int:
        """Append the next forced token and return it."""
        return self._keep(self.forced.popleft(), answer=False)

    def advance(self, drawn: int, remaining: int) -> int:
        """Append the next token, a forced one or `drawn`, and return it. remaining: positions left in the row."""
        if self.done:
            return drawn
        if self.forced:
            return self.take()
        if self.asks:
            return self._ask(drawn)
        self.words += 1
        if drawn in self.form.stops:
            self._end_answer(drawn, remaining)
        return self._keep(drawn, answer=True)

    def _ask(self, drawn: int) -> int:
        if self.words and (drawn in self.form.stops or self.words >= QUESTION_LIMIT * self.length):
            self.asks, self.words = False, 0
            self.forced.extend(self.form.to_answer)
            return self.take()
        self.words += 1
        return self._keep(drawn, answer=False)

    def _end_answer(self, drawn: int, remaining: int) -> None:
        rest = self.form.to_user[1:] if self.form.to_user[:1] == [drawn] else self.form.to_user
        self.words = 0
        if self.turns:
            turn = self.turns.popleft()
            self.forced.extend(turn[len(self.form.to_user) - len(rest) :])
        elif self.form.chat and not self.prompted and remaining > TURN_ROOM * self.length:
            self.forced.extend(rest)
            self.asks = True
        else:
            self.done = True

    def _keep(self, token: int, *, answer: bool) -> int:
        self.tokens.append(token)
        self.answers.append(answer)
        return token

    def text(self) -> Text:
        return Text(
            torch.tensor(self.tokens, dtype=torch.int32, device="cpu"),
            torch.tensor(self.answers, dtype=torch.bool, device="cpu"),
        )


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
