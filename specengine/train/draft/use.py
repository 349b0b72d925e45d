"""Go on training a draft head on a user's own texts, in rounds that only a better head survives.

A round trains a copy of the head in use on texts of the ring, mixed with text that the target wrote by itself.
Candidates are the copy, and mixtures of its weights with those of the head in use: they keep more of what was known
(WiSE-FT, https://arxiv.org/abs/2109.01903). They are compared on held-back texts of both kinds, by tokens per cycle of
a greedy chain, text by text. The first one is put into use that is better on the user's texts than the head in use, by
more than twice the standard error, and on the others no worse than the head that learning began with, by more than one.
Where none is, the copy is forgotten, and the next round learns half as fast.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specengine.checkpoints import eagle
from specengine.checkpoints.learnt import HELD_BACK, Learnt, UsedText
from specengine.drafters import innermost
from specengine.drafters.eagle import EagleDraft
from specengine.engine import Engine
from specengine.errors import (
    ABOVE_0,
    Checked,
    at_least,
    number,
    option,
    require_input,
)
from specengine.models.eagle import head_from
from specengine.train.draft.losses import loss_of
from specengine.train.draft.options import Loss, make_loss
from specengine.train.draft.teacher import Reading, ServingTeacher
from specengine.train.draft.validation import autocasting, chain_lengths, fit_temperatures
from specengine.train.text import SynthesisOptions
from specengine.train.text.corpus import Corpus, Text
from specengine.train.text.synthesis import write_corpus

LOSS = make_loss("ttt", steps=6, anchors=0.25, decay=0.8)  # as the head that ships was trained
GENERAL = SynthesisOptions(tokens=60_000, rows=16, length=512)  # text by the target itself
MIN_TEXTS = 20, 4  # texts to train on, and held back
COMPARED = 64  # held-back texts of the user, the newest
SHARES = 1.0, 0.6, 0.35  # of the copy in the candidates
CALIBRATED = 12  # texts that temperatures are fitted to
SLOWEST = 1 / 16  # of the rate: from there on learning waits for new texts

Progress = Callable[[str], None]


@dataclass(frozen=True)
class UseOptions(Checked):
    """Options of learning from use."""

    steps: int = option(
        at_least(1),
        default=80,
        help="optimiser steps of a round, 1 or more",
    )
    step_tokens: int = option(
        at_least(1),
        default=1024,
        help="tokens per step, 1 or more",
    )
    general: float = option(
        number(0, 1, "0 to below 1", open_high=True),
        default=0.5,
        help="share of them that the target wrote by itself, 0 to below 1",
    )
    learning_rate: float = option(
        ABOVE_0,
        default=4e-4,
        help="peak learning rate, above 0; it rises and falls within a round",
    )


class HeadComparison(NamedTuple):
    """Hold tokens per cycle of the head in use, what a candidate has beyond that, and the standard error of this."""

    before: float
    gain: float
    error: float

    def __str__(self) -> str:
        return f"{self.before:.3f} {self.gain:+.3f} (standard error {self.error:.3f})"


class Round(NamedTuple):
    """Tell a round's result on the user's held-back texts and on others, and whether the candidate is in use."""

    own: HeadComparison
    general: HeadComparison
    swapped: bool
    rate: float
    seconds: float
    cpu_seconds: float


class Learner:
    """Learns from the ring of an engine that was loaded with `learn`.

    turn: called between two texts, may wait. InputError where the engine's draft learns nothing.
    """

    def __init__(
        self,
        engine: Engine,
        options: UseOptions | None = None,
        *,
        loss: Loss = LOSS,
        turn: Callable[[], None] = lambda: None,
        progress: Progress = lambda line: None,
        general: Sequence[Text] | None = None,
    ) -> None:
        draft = None if engine.drafter is None else innermost(engine.drafter)
        learnt = draft.learnt if isinstance(draft, EagleDraft) else None
        require_input("learn: this engine was not loaded with `learn`", learnt is not None)
        self.learnt = cast(Learnt, learnt)
        engine.ring = None  # what is written here is not the user's
        config = self.learnt.base.config
        require_input(
            "learn: this head reads the target's vocabulary head, so it cannot learn from use",
            config.own_head,
        )
        self.engine, self.options, self.loss, self.turn, self.progress = (
            engine,
            options or UseOptions(),
            loss,
            turn,
            progress,
        )
        self.target: Any = engine.target
        self.teacher: Any = ServingTeacher(
            engine.target,
            config.feature_ids(engine.target.lm.layers),  # type: ignore[attr-defined]
        )
        self._general = None if general is None else list(general)
        self._scores: dict[str, Tensor] = {}  # of the head in use, by text
        self.rounds = 0

    def learn(self, seconds: float) -> list[Round]:
        """Run rounds for so long, the last one to its end; fewer where no candidate is better any more.

        InputError while there are too few texts, and where another process is learning.
        """
        end, rounds, rate = time.monotonic() + seconds, list[Round](), self.options.learning_rate
        with self.learnt.alone():
            while not rounds or (
                time.monotonic() < end and rate >= self.options.learning_rate * SLOWEST
            ):
                rounds.append(self.round(rate))
                if not rounds[-1].swapped:
                    rate /= 2
        return rounds

    def round(self, rate: float) -> Round:
        """Train a candidate, compare it, and put it into use where it is better."""
        began = time.monotonic(), time.process_time()
        ring = self.learnt.texts()
        learnt_from, held_back = (
            [text for text in ring if text.held_back is back] for back in (False, True)
        )
        require_input(
            f"learn: {len(learnt_from)} texts to train on and {len(held_back)} held back are too few, "
            f"{MIN_TEXTS[0]} and {MIN_TEXTS[1]} are needed; go on using {self.learnt.folder}",
            len(learnt_from) >= MIN_TEXTS[0] and len(held_back) >= MIN_TEXTS[1],
        )
        general = self.general()
        trained = [text for number, text in enumerate(general) if number % HELD_BACK]
        current = self.learnt.head()
        texts = [as_text(text) for text in learnt_from]
        copy = self.trained(current, texts, trained, rate)
        others = [
            (f"general-{number}", text)
            for number, text in enumerate(general)
            if number % HELD_BACK == 0
        ]
        mine = [(text.name, as_text(text)) for text in held_back[-COMPARED:]]
        for share in SHARES:
            candidate = mixed(current, copy, share)
            on_own = self.compared(current, candidate, mine)
            # so that small losses do not add up
            on_others = self.compared(self.learnt.base, candidate, others)
            if better := on_own.gain > 2 * on_own.error and on_others.gain >= -on_others.error:
                self.swap(candidate, [text for _, text in (*mine, *others)])
                break
        spent = time.monotonic() - began[0], time.process_time() - began[1]
        done = Round(on_own, on_others, better, rate, *(round(seconds, 1) for seconds in spent))
        self.learnt.note(done._asdict() | {"own": on_own._asdict(), "general": on_others._asdict()})
        self.rounds += 1
        self.progress(
            f"round {self.rounds}: tokens per cycle {done.own}, on other text {done.general}: "
            f"{'in use' if better else 'forgotten'}"
        )
        return done

    def general(self) -> list[Text]:
        """Return text that the target wrote by itself; it is written once."""
        if self._general is None:
            self.progress("writing text to compare with, once")
            folder = self.learnt.folder / "general"
            corpus: Corpus = write_corpus(
                self.target,
                self.engine.tokenizer,
                folder,
                GENERAL,
                name=self.target.name,
                progress=lambda line: self.turn(),
            )
            self._general = [text for text in corpus if text.answers[2:].any()]
        return self._general

    # ---- training

    def trained(
        self,
        start: eagle.Checkpoint,
        learnt_from: Sequence[Text],
        general: Sequence[Text],
        rate: float,
    ) -> eagle.Checkpoint:
        """Return the head after a round's steps, in the dtype that it is kept in."""
        options, order = self.options, random.Random(len(self.learnt.rounds()))
        # float32 weights would be taken as they are
        state = {name: tensor.clone() for name, tensor in start.state.items()}
        head = (
            head_from(start.config, state, torch.float32, self.teacher.device)
            .train()
            .requires_grad_(True)
        )
        learns = [
            weight for name, weight in head.named_parameters() if name != "embed_tokens.weight"
        ]
        optimizer = torch.optim.AdamW(learns, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        for step in range(options.steps):
            share = (step + 1) / (options.steps + 1)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, 10 * share, (1 - share) / 0.7)
            texts = [
                *_drawn(learnt_from, options.step_tokens * (1 - options.general), order),
                *(
                    _drawn(general, options.step_tokens * options.general, order)
                    if options.general
                    else ()
                ),
            ]
            optimizer.zero_grad(set_to_none=True)
            reading, answers = self._read(texts)
            with autocasting(self.teacher.device, enabled=True):
                loss_of(self.loss, head, self.teacher, reading, answers).loss.backward()
            torch.nn.utils.clip_grad_norm_(learns, 0.5)
            optimizer.step()
        kept = {
            name: tensor.to(start.state[name].dtype) for name, tensor in head.state_dict().items()
        }
        return start._replace(state=kept)

    def _read(self, texts: Sequence[Text]) -> tuple[Reading, Tensor]:
        """Return the target's reading of texts, padded after their ends, and their answers, bool [texts, length]."""
        readings = []
        for text in texts:
            self.turn()
            readings.append(self.teacher.read_text(text))
        tokens, features, states = (
            pad_sequence([reading[part][0] for reading in readings], batch_first=True)
            for part in range(3)
        )
        return Reading(tokens, features, states, None), pad_sequence(
            [text.answers for text in texts], batch_first=True
        )

    # ---- comparing

    def compared(
        self,
        current: eagle.Checkpoint,
        candidate: eagle.Checkpoint,
        texts: Sequence[tuple[str, Text]],
    ) -> HeadComparison:
        """Compare two heads on texts, by name; those of a name always with the same one until a swap."""
        was = torch.stack(
            [
                self._scores[name] if name in self._scores else self._score(current, text)
                for name, text in texts
            ]
        )
        self._scores |= {name: row for (name, _), row in zip(texts, was, strict=True)}
        now = torch.stack([self._score(candidate, text) for _, text in texts])
        rows = was[:, 1]
        before, after = float(was[:, 0].sum() / rows.sum()), float(now[:, 0].sum() / rows.sum())
        # of a ratio of sums, by texts
        off = (now[:, 0] - was[:, 0]) - (after - before) * rows
        error = float(
            (off.square().sum() * len(texts) / max(len(texts) - 1, 1)).sqrt() / rows.sum()
        )
        return HeadComparison(before, after - before, error)

    def _score(self, found: eagle.Checkpoint, text: Text) -> Tensor:
        self.turn()
        head = head_from(found.config, found.state, torch.float32, self.teacher.device)
        return chain_lengths(head, self.teacher, text)

    def swap(self, found: eagle.Checkpoint, texts: Sequence[Text]) -> None:
        """Put a head into use, with temperatures fitted to these held-back texts."""
        head = head_from(found.config, found.state, torch.float32, self.teacher.device)
        temperatures = (
            fit_temperatures(head, self.teacher, texts[:: -(-len(texts) // CALIBRATED)])
            or found.config.temperatures
        )
        self.learnt.swap(replace(found.config, temperatures=temperatures), found.state)
        self._scores.clear()


def mixed(head: eagle.Checkpoint, other: eagle.Checkpoint, share: float) -> eagle.Checkpoint:
    """Return a head with this share of the other one's weights."""
    state = {
        name: tensor.float().lerp(other.state[name].float(), share).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in head.state.items()
    }
    return head._replace(state=state)


def as_text(text: UsedText) -> Text:
    """Return a text of the ring as training reads it."""
    tokens = torch.tensor(text.tokens, dtype=torch.int32, device="cpu")
    return Text(tokens, torch.arange(len(tokens), dtype=torch.int64, device="cpu") >= text.prompt)


def _drawn(texts: Sequence[Text], tokens: float, order: random.Random) -> list[Text]:
    """Return texts at random of that many tokens together, at least one; such as have too short an answer are left."""
    usable, chosen, total = [text for text in texts if text.answers[2:].any()], list[Text](), 0
    while usable and (total < tokens or not chosen):
        chosen.append(order.choice(usable))
        total += len(chosen[-1].tokens)
    return chosen
