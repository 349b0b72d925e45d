"""Write training text without a data set: the target writes the user's turns and answers them.

A chat model that is prompted with the beginning of a user's turn continues like the users in its training data. Its
answers are the text that a draft has to predict. Most turns begin with one of OPENERS: at a bare beginning, a model of
code pastes code, and answers little. A base model continues a single random token.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from specengine.errors import InputError, require_input
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget, RowBatch
from specengine.request.prompts import filled
from specengine.request.text import special_texts
from specengine.train.text import SynthesisOptions
from specengine.train.text.corpus import Corpus, States, Text

# Temperatures of the rows of a batch, in turn. A draft meets greedy answers most; the others add variety.
ANSWER_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
USER_TEMPERATURE = 1.0
MIN_P = 0.02  # tokens below this share of the best token's probability are not drawn
TURN_ROOM = 0.3  # share of the length: with less room, a conversation ends with its answer
QUESTION_LIMIT = 0.5  # share of the length at which a user's turn is ended
TOP = 32  # tokens whose chances are kept
PIECE = 64  # tokens of a prompt that a text runs at a time
BLOCK = 128  # tokens
MAY_GROW = ("tokens", "gib")  # options of a folder that a later call may change
# first tokens of a base model's text, drawn at temperature 1 so that greedy rows differ
BASE_LEAD = 8

# how requests of the kinds that users send begin; the model goes on with them
OPENERS = (
    "How do I",
    "How can I",
    "How does",
    "Why",
    "What is",
    "What are the",
    "What happens when",
    "Who",
    "When did",
    "Where",
    "Which",
    "Can you",
    "I want to",
    "I have a",
    "My",
    "Tell me about",
    "Explain",
    "Describe",
    "Compare",
    "List",
    "Name three",
    "Give me",
    "Suggest",
    "Write a",
    "Write an e-mail",
    "Write a short story about",
    "Write a function that",
    "Write a Python program that",
    "Complete this function:\n\n```python\ndef",
    "Fix the bug in this code:\n\n```",
    "What does this code do?\n\n```",
    "Add tests for this class:\n\n```",
    "Summarize the following article:\n\n",
    "Summarize this text in three sentences:\n\n",
    "Rewrite this paragraph:\n\n",
    "Answer the question from the text.\n\n",
    "Extract the names and dates:\n\n",
    "Correct the grammar:",
    "Translate into German:",
    "Classify",
    "Calculate",
    "If a",
    "A shop sells",
    "Imagine you are",
)


@dataclass(frozen=True)
class ChatFormat:
    """The token ids of a chat template around the turns. A base model has only `before`.

    before        ids before the user's first turn
    to_answer     ids between a user's turn and the answer
    to_user       ids between an answer and the user's next turn
    stops         tokens that end a turn
    openers       beginnings of a user's turn
    """

    before: list[int]
    to_answer: list[int] = field(default_factory=list)
    to_user: list[int] = field(default_factory=list)
    stops: frozenset[int] = frozenset()
    openers: tuple[list[int], ...] = ()

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
        messages = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]
        question = filled(tokenizer, messages[:1], add_generation_prompt=True)
        dialogue = filled(tokenizer, messages, add_generation_prompt=True)
        try:
            before, to_answer = question.split(marks[0])
            to_user = dialogue.split(marks[1])[1].split(marks[2])[0]
        except (ValueError, IndexError) as error:
            raise InputError("target: its chat template changes the text of the turns") from error
        texts = (before, to_answer, to_user)
        first, second, third = (
            list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts
        )
        openers = tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in OPENERS)
        return cls(first, second, third, stops | {second[0], third[0]}, openers)


def as_turns(turns: Sequence[str], form: ChatFormat, tokenizer: Any) -> list[list[int]]:
    """Return the ids of each user's turn with the ids of the chat template around it."""
    plain = [list(tokenizer(turn, add_special_tokens=False)["input_ids"]) for turn in turns]
    first, *later = plain
    return [
        form.before + first + form.to_answer,
        *(form.to_user + turn + form.to_answer for turn in later),
    ]


class Writer(ABC):
    """Writes conversations of a format, up to `options.length` tokens long, in shards of `options.rows`.

    features: the hidden states that are kept; none: no states are
    """

    def __init__(
        self,
        target: HuggingFaceTarget | NativeTarget,
        form: ChatFormat,
        options: SynthesisOptions,
        tokenizer: Any,
        features: tuple[int, ...] = (),
    ) -> None:
        self.target: Any = target
        self.form, self.options, self.features = form, options, features
        special = special_texts(tokenizer).keys() | form.stops
        self._ordinary = [
            i for i in range(min(target.vocab_size, len(tokenizer))) if i not in special
        ]
        self._openers = [ids for ids in form.openers if len(ids) < TURN_ROOM * options.length]
        markup = set(range(target.vocab_size)) - {*self._ordinary, *form.stops}  # and unnamed rows
        self._markup, self._stops = (
            torch.tensor(sorted(ids), dtype=torch.int64, device=target.device)
            for ids in (markup, form.stops)
        )

    def write(self, shard: int, prompts: list[list[list[int]]]) -> list[Text]:
        """Return the texts of a shard that have an answer. prompts: users' turns of conversations to mix in."""
        generator = torch.Generator(self._stops.device).manual_seed(
            self.options.seed * 1_000_003 + shard
        )
        rows = [self.row(number, shard, prompts) for number in range(self.options.rows)]
        with torch.inference_mode():
            self._fill(rows, generator)
        return [row.text() for row in rows if any(row.answers)]

    @abstractmethod
    def _fill(self, rows: list[Row], generator: torch.Generator) -> None:
        """Write the conversations of a shard to their ends."""

    def draw(self, logits: Tensor, rows: list[Row], generator: torch.Generator) -> list[int]:
        """Return each row's next token at its temperature. logits: [rows, vocabulary]; those of users are changed."""
        device = logits.device
        users = [number for number, row in enumerate(rows) if row.asks]
        begun = [number for number in users if not rows[number].words]
        # a user's turn has at least one word, and no markup in it
        for numbers, banned in ((users, self._markup), (begun, self._stops)):
            places = torch.tensor(numbers, device=device, dtype=torch.int64)
            logits[places[:, None], banned] = float("-inf")
        best = logits.argmax(dim=-1)
        temperatures = torch.tensor(
            [row.temperature_now for row in rows], device=device, dtype=torch.float32
        )
        drawing = temperatures.nonzero()[:, 0]
        if len(drawing):
            best[drawing] = _sample(logits, drawing, temperatures[drawing], generator)
        return best.tolist()

    def row(self, number: int, shard: int, prompts: list[list[list[int]]]) -> Row:
        temperature = ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)]
        if prompts and number < self.options.prompt_share * self.options.rows:
            turns = prompts[(shard * self.options.rows + number) % len(prompts)]
            return Row(self.form, self.options.length, temperature, turns)
        begin = list(self.form.before)
        draw = Random(f"{self.options.seed} {shard} {number}")
        if not self.form.chat:
            begin.append(draw.choice(self._ordinary))
        elif self._openers and draw.random() < self.options.opener_share:
            begin += draw.choice(self._openers)
        return Row(self.form, self.options.length, temperature, [begin])


class Row:
    """One conversation while it is written."""

    def __init__(
        self, form: ChatFormat, length: int, temperature: float, turns: list[list[int]]
    ) -> None:
        self.form, self.length, self.temperature = form, length, temperature
        self.forced = deque(turns[0])  # tokens to append before any is drawn
        self.turns = deque(turns[1:])  # later turns of a prompt
        self.prompted = form.chat and turns[0][-len(form.to_answer) :] == form.to_answer
        self.asks = form.chat and not self.prompted
        # tokens of this turn, without the template's
        self.words = len(turns[0]) - len(form.before) if self.asks else 0
        self.done = False
        self.tokens: list[int] = []
        self.answers: list[bool] = []
        self.states: States | None = None  # at the tokens

    @property
    def temperature_now(self) -> float:
        if self.forced or self.done:
            return 0.0
        leads = not self.form.chat and self.words < BASE_LEAD
        return USER_TEMPERATURE if self.asks or leads else self.temperature

    def take(self) -> int:
        """Append the next forced token and return it."""
        return self._keep(self.forced.popleft(), answer=False)

    def advance(self, drawn: int) -> int:
        """Append the next token, a forced one or `drawn`, and return it."""
        if self.done:
            return drawn
        if self.forced:
            return self.take()
        if self.asks:
            return self._ask(drawn)
        self.words += 1
        if drawn in self.form.stops:
            self._end_answer(drawn)
        return self._keep(drawn, answer=True)

    def _ask(self, drawn: int) -> int:
        if self.words and (drawn in self.form.stops or self.words >= QUESTION_LIMIT * self.length):
            self.asks, self.words = False, 0
            self.forced.extend(self.form.to_answer)
            return self.take()
        self.words += 1
        return self._keep(drawn, answer=False)

    def _end_answer(self, drawn: int) -> None:
        rest = self.form.to_user[1:] if self.form.to_user[:1] == [drawn] else self.form.to_user
        self.words = 0
        if self.turns:
            turn = self.turns.popleft()
            self.forced.extend(turn[len(self.form.to_user) - len(rest) :])
        elif (
            self.form.chat
            and not self.prompted
            and self.length - len(self.tokens) > TURN_ROOM * self.length
        ):
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
            self.states,
        ).begin(len(self.tokens))


def write_corpus(  # noqa: PLR0913
    target: HuggingFaceTarget | NativeTarget,
    tokenizer: Any,
    folder: Path,
    options: SynthesisOptions,
    *,
    name: str,
    prompts: Sequence[Sequence[str]] = (),
    features: tuple[int, ...] = (),
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Let a model write training text into `folder` until it has `options.tokens` tokens.

    target: writes all conversations of a shard at once; the native forward also gives the states of what it writes.
    prompts: users' turns of conversations to mix in.
    features: hidden states that are kept for training, numbered as in transformers, of the native forward.
    seconds: of writing, over all calls, after which no shard is begun.

    After an interruption, the same call resumes after the last complete shard and ends with the same text. Raise
    InputError if `folder` was begun with other settings, and if `options.gib` is too little for a shard's states.
    """
    form = ChatFormat.of(tokenizer, stop_tokens(target, tokenizer))
    turn_ids = [
        ids
        for ids in (as_turns(turns, form, tokenizer) for turns in prompts)
        if len(ids[0]) < options.length
    ]
    require_input(
        f"prompts: each is longer than the length of {options.length} tokens",
        not prompts or bool(turn_ids),
    )
    require_input(
        f"length: got {options.length}, but the beginning of a text has {len(form.before)} tokens",
        form.chat or len(form.before) + 1 < options.length,
    )
    manifest: dict[str, Any] = {
        "target": name,
        "prompts": len(turn_ids),
        "vocab_size": target.vocab_size,
    }
    writer: Writer = Lockstep(target, form, options, tokenizer)
    most = options.tokens
    if isinstance(target, NativeTarget):
        writer = Lanes(target, form, options, tokenizer, features if options.gib else ())
        manifest |= {"writer": target.lm.numerics, "features": list(writer.features)}
        if writer.features:  # the states of all tokens, and of a last shard, stay within the bound
            shard = options.rows * options.length
            room = int(options.gib * 2**30) // writer.token_bytes - shard
            require_input(
                f"gib: got {options.gib:g}, but the hidden states of {shard:,} tokens take "
                f"{shard * writer.token_bytes / 2**30:.2f} GiB; allow more, or choose fewer rows or a smaller length",
                room >= 0,
            )
            most = min(most, room + 1)
    settings = {field: value for field, value in asdict(options).items() if field not in MAY_GROW}
    corpus = Corpus.create(folder, manifest | settings)
    number, have, spent = 0, 0, 0.0
    while have < most and spent < seconds:
        if not corpus.shard(number).is_file():
            began = time.perf_counter()
            if not have:  # the first text takes longest to begin
                progress("Writing the first shard; a line follows each")
            try:
                texts = writer.write(number, turn_ids)
            except KeyboardInterrupt:
                progress(
                    f"Stopped at {have:,} tokens; the shard under way is lost, the others stay"
                )
                raise
            corpus.add(number, texts, time.perf_counter() - began)
        have += sum(len(text.tokens) for text in corpus.read(number))
        spent += corpus.seconds(number)
        share = min(1.0, max(have / most, spent / seconds))
        remaining = spent * (1 / share - 1)
        progress(
            f"{have:,} tokens written ({share:.0%}), {have / (spent or 1):.0f} per second, "
            f"{remaining / 60:.0f} min left"
        )
        number += 1
    return corpus


def stop_tokens(target: HuggingFaceTarget | NativeTarget, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a sequence, from the model's generation config and the tokenizer."""
    config = target.generation_config
    ends = config.eos_token_id if config else None
    ids = [ends] if isinstance(ends, int) else list(ends or [])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)


# ---- writers


class Lockstep(Writer):
    """Writes a batch of conversations in lockstep. All rows are at the same position, so nothing is padded."""

    def _fill(self, rows: list[Row], generator: torch.Generator) -> None:
        model, device = self.target.lm.model.eval(), self.target.device
        lead = min(len(row.forced) for row in rows)
        inputs = torch.tensor(
            [[row.take() for _ in range(lead)] for row in rows], device=device, dtype=torch.int64
        )
        cache = DynamicCache(config=model.config)
        for _ in range(lead, self.options.length):
            logits = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
                :, -1
            ]
            drawn = self.draw(logits, rows, generator)
            inputs = torch.tensor(
                [[row.advance(token)] for row, token in zip(rows, drawn, strict=True)],
                device=device,
                dtype=torch.int64,
            )
            if all(row.done for row in rows):
                break


def _sample(
    logits: Tensor, rows: Tensor, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Return a drawn token for each of these rows, int64 [rows]."""
    below = temperatures[:, None] * math.log(MIN_P)
    logits, ids = _with_largest(
        logits,
        rows,
        lambda largest: int(
            (largest >= largest.amax(dim=1, keepdim=True) + below).sum(dim=1).max()
        ),
    )
    probabilities = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    probabilities[probabilities < MIN_P * probabilities.amax(dim=-1, keepdim=True)] = 0
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(1, drawn)[:, 0]


def _with_largest(
    logits: Tensor, rows: Tensor, count: Callable[[Tensor], int]
) -> tuple[Tensor, Tensor]:
    """Return the logits and token ids of the blocks of tokens with the largest logits, of these rows, [rows, any].

    count: how many blocks, by the largest logit of each block. Reading all of a large vocabulary once and then few
    tokens is several times faster than softmax and top-k of all.
    """
    if beyond := logits.shape[1] % BLOCK:
        logits = pad(logits, (0, BLOCK - beyond), value=float("-inf"))
    blocks = logits.unflatten(1, (-1, BLOCK))
    largest = blocks.amax(dim=-1)[rows]
    best = largest.topk(min(count(largest), largest.shape[1]), dim=-1)
    chosen = best.indices.sort(dim=-1).values
    places = torch.arange(BLOCK, dtype=torch.int64, device=logits.device)
    return blocks[rows[:, None], chosen].flatten(1), (chosen[..., None] * BLOCK + places).flatten(1)


class Lanes(Writer):
    """Writes the conversations of a shard at the same time on the native forward, each with a cache of its own.

    The same forwards give what a draft learns from, as it will be when the target serves. A text's tokens and states do
    not depend on the other texts.
    """

    @property
    def token_bytes(self) -> int:
        """Return the bytes that the states of a token take on disk."""
        lm = self.target.lm
        return 2 * len(self.features) * lm.shape.hidden + 6 * min(TOP, lm.vocab_size)

    def _fill(self, rows: list[Row], generator: torch.Generator) -> None:
        lanes = [_Lane(row, self.target.lm, self.features) for row in rows]
        while lanes := [lane for lane in lanes if lane.goes_on]:
            self._step(lanes, generator)

    def _step(self, lanes: list[_Lane], generator: torch.Generator) -> None:
        """Run the next tokens of each lane, and draw one for those that have run all."""
        batch = [lane.ask() for lane in lanes]
        drawing = [lane for lane, rows in zip(lanes, batch, strict=True) if rows.logits is not None]
        logits = self.target.lm.run_lanes(batch)
        for lane, rows in zip(lanes, batch, strict=True):
            lane.keep(rows)
        if logits is None:  # pieces of prompts alone
            return
        if self.features:
            everyone = torch.arange(len(drawing), dtype=torch.int64, device="cpu")
            values, ids = _with_largest(logits, everyone, lambda largest: TOP)
            top = values.topk(min(TOP, logits.shape[1]), dim=-1)
            # a few rows at a time stay in the cache
            sums = [some.logsumexp(dim=-1, keepdim=True) for some in logits.split(4)]
            logs = top.values - torch.cat(sums)
            for lane, tokens, chances in zip(
                drawing, ids.gather(1, top.indices), logs, strict=True
            ):
                lane.label(tokens, chances)
        drawn = self.draw(logits, [lane.row for lane in drawing], generator)
        for lane, token in zip(drawing, drawn, strict=True):
            lane.row.advance(token)


class _Lane:
    """A conversation with its cache and its states."""

    def __init__(self, row: Row, lm: NativeLM, features: tuple[int, ...]) -> None:
        self.row = row
        self._lm, self._features = lm, features
        self._cache = lm.new_cache(1)
        width, count = len(features) * lm.shape.hidden, min(TOP, lm.vocab_size)
        self._states = States(
            torch.zeros(row.length, width, dtype=torch.bfloat16, device="cpu"),
            torch.zeros(row.length, count, dtype=torch.int32, device="cpu"),
            torch.zeros(row.length, count, dtype=torch.bfloat16, device="cpu"),
        )
        row.states = self._states if features else None

    @property
    def _is_open(self) -> bool:
        return not self.row.done and len(self.row.tokens) < self.row.length

    @property
    def goes_on(self) -> bool:
        return self._is_open or self._cache.length < len(self.row.tokens)

    def ask(self) -> RowBatch:
        """Return the next tokens to run: forced ones in pieces, without the last one, whose logits are wanted."""
        row, start = self.row, self._cache.length
        while row.forced and len(row.tokens) < row.length:
            row.take()
        whole = len(row.tokens) - start
        count = min(PIECE, whole - 1 if whole > 1 and self._is_open else whole)
        rows = self._lm.rows_of(row.tokens[start : start + count], self._cache, self._features)
        if self._is_open and start + count == len(row.tokens):  # a token is drawn after them
            rows.logits = torch.empty(1, self._lm.vocab_size, dtype=torch.float32, device="cpu")
        return rows

    def keep(self, rows: RowBatch) -> None:
        start, self._cache.length = self._cache.length, self._cache.length + len(rows.tokens)
        if rows.states is not None:
            self._states.features[start : self._cache.length] = rows.states

    def label(self, tokens: Tensor, logs: Tensor) -> None:
        """Note the likeliest tokens after the last one, unless a user's turn goes on there."""
        if not self.row.asks:
            self._states.ids[self._cache.length - 1] = tokens
            self._states.logs[self._cache.length - 1] = logs
