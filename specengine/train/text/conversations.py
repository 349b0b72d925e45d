"""Conversations while they are written: their format, whose turn it is, and forced tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.errors import InputError
from specengine.request.templates import filled
from specengine.train.text.corpus import Text
from specengine.train.text.options import SynthesisOptions

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
