"""Conversations while they are written: their form, who speaks, and what is forced."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.errors import InputError
from specengine.train.text.corpus import Text
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


def as_turns(turns: Sequence[str], form: Format, tokenizer: Any) -> list[list[int]]:
    """The ids of each user's turn with what stands around it."""
    plain = [list(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in turns]
    first, *later = plain
    return [form.before + first + form.to_answer, *(form.to_user + turn + form.to_answer for turn in later)]


class Writer(ABC):
    """Writes conversations of a form, longest `options.length`, a shard of `options.rows` at a time."""

    def __init__(self, form: Format, options: SynthesisOptions, tokenizer: Any, vocab_size: int) -> None:
        self.form, self.options = form, options
        special = set(tokenizer.all_special_ids) | form.stops
        self.no_words = sorted(i for i in special if i < vocab_size)
        self._ordinary = [i for i in range(min(vocab_size, len(tokenizer))) if i not in special]

    def write(self, shard: int, given: list[list[list[int]]]) -> list[Text]:
        """Without those that never came to an answer; given: the users' turns of conversations to be mixed in."""
        return [text for text in self._texts(shard, given) if text.answers.any()]

    @abstractmethod
    def _texts(self, shard: int, given: list[list[list[int]]]) -> list[Text]: ...

    def seed(self, shard: int) -> int:
        return self.options.seed * 1_000_003 + shard

    def row(self, number: int, shard: int, given: list[list[list[int]]], generator: torch.Generator) -> Row:
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        if given and number < self.options.prompt_share * self.options.rows:
            turns = given[(shard * self.options.rows + number) % len(given)]
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
    def leads(self) -> bool:
        return not self.form.chat and self.words < BASE_LEAD

    @property
    def temperature_now(self) -> float:
        if self.forced or self.done:
            return 0.0
        return USER_TEMPERATURE if self.asks or self.leads else self.temperature

    @property
    def most_words(self) -> int:
        """That it draws on at this temperature, where it is not cut by its length."""
        if self.asks:
            return max(1, math.ceil(LONGEST_QUESTION * self.length) - self.words)
        return BASE_LEAD - self.words if self.leads else self.length

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
        return Text(
            torch.tensor(self.tokens, dtype=torch.int32, device="cpu"),
            torch.tensor(self.answers, dtype=torch.bool, device="cpu"),
        )
