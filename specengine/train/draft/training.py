"""Train a draft head on text that the target wrote."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from transformers import PreTrainedModel

from specengine.checkpoints import likeness
from specengine.checkpoints.eagle import Verifier, save_head
from specengine.errors import InputError, require_input, why_not_loaded
from specengine.files import atomic, write_whole
from specengine.models.configs import family_of
from specengine.models.eagle import EagleHead, require_fit
from specengine.models.huggingface import HuggingFaceTarget
from specengine.models.native import NativeLM, NativeTarget
from specengine.train.draft.losses import Report, check_fit, loss_of
from specengine.train.draft.new_heads import Weights, new_head, start_from_text
from specengine.train.draft.options import Loss, TrainOptions, make_loss
from specengine.train.draft.teacher import HeadTeacher, StoredTeacher, Teacher
from specengine.train.draft.validation import autocasting, fit_temperatures, validate
from specengine.train.text.corpus import Corpus, Text

STATE, LOG = "training.pt", "log.jsonl"
MEASURE_EVERY = 10  # steps
MAX_HELD_BACK = 32  # texts
# steps that are timed to choose their number, and share of the time that steps take
PACED, PACED_SHARE = 5, 0.85
MIN_STEPS, VALIDATIONS = 100, 24  # where their number is chosen
START_BATCHES = 24  # batches that the initial EAGLE-1 head is fitted to
# options that do not change the result
HOUSEKEEPING = "validate_every", "save_every", "temperatures"

Progress = Callable[[str], None]
Teaching = Callable[[PreTrainedModel, tuple[int, ...]], Teacher]


def train_draft(  # noqa: PLR0913
    model: PreTrainedModel | NativeLM,
    corpus: Corpus,
    out: Path,
    options: TrainOptions,
    loss: Loss | None = None,
    *,
    name: str = "",
    stop_after: int | None = None,
    seconds: float | None = None,
    teach: Teaching = Teacher,
    progress: Progress = lambda line: None,
) -> Path:
    """Train a head for `model` and save it in the folder `out`, every `save_every` steps and at the end.

    A NativeLM learns from the states that were kept with the text, and is not run again. Where there are none, or the
    loss needs more, its model is run by transformers.

    stop_after: end at this step of the schedule.
    seconds: choose as many steps as take so long by the pace of the first ones, in the place of `options.steps`.
    teach: makes the teacher of a model that transformers runs, from it and the hidden states that the head reads.

    After an interruption, the same call resumes from the last saved state, with the same result. Raise InputError for
    text of another target, and for a folder that was begun with other settings.
    """
    loss = loss or make_loss("ttt")
    run = _Run(model, corpus, out, options, loss, name, progress, seconds, teach)
    run.train(min(stop_after or run.options.steps, run.options.steps))
    return out


class _Learner(NamedTuple):
    """A head, and what learns its weights; average: of them over the steps, if `average` is set."""

    head: EagleHead
    weights: list[torch.nn.Parameter]
    optimizer: torch.optim.AdamW
    average: AveragedModel | None

    @property
    def result(self) -> EagleHead:
        """The head so far, with averaged weights if there are any."""
        return self.head if self.average is None else cast(EagleHead, self.average.module)


class _Run:
    def __init__(  # noqa: PLR0913
        self,
        model: PreTrainedModel | NativeLM,
        corpus: Corpus,
        out: Path,
        options: TrainOptions,
        loss: Loss,
        name: str,
        progress: Progress,
        seconds: float | None,
        teach: Teaching,
    ) -> None:
        # fail now rather than after the training
        self.target = (
            NativeTarget(model)
            if isinstance(model, NativeLM)
            else HuggingFaceTarget(model, pack=False)
        )
        vocab_size = self.target.vocab_size
        require_input(
            f"data: the text was written by {corpus.manifest.get('target')!r} with a vocabulary of "
            f"{corpus.manifest.get('vocab_size')}; this target has {vocab_size}",
            corpus.manifest.get("vocab_size") == vocab_size,
        )
        self.out, self.name, self.loss, self.progress = out, name, loss, progress
        saved = self._read_state()
        if seconds is not None and saved is not None:
            options = replace(options, steps=saved["options"]["steps"])
        self.options = options
        self.begun_as = {"options": _settings(options), "loss": asdict(loss)}
        self._require_same(saved, *self.begun_as)
        self.epochs = Epochs(corpus, options, None if saved is None else saved["shards"])
        tokens = b"".join(batch.tokens.numpy().tobytes() for batch in self.epochs.batches)
        self.begun_as["text"] = hashlib.sha256(tokens).hexdigest()[:16]
        self._require_same(saved, "text")
        counts = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
        for batch in self.epochs.batches:
            counts += batch.tokens[batch.answers].bincount(minlength=vocab_size)
        head = new_head(model, options, loss, counts)
        check_fit(loss, head)
        require_fit(head.config, self.target.lm)
        ids = head.target_ids()
        coverage = 1.0 if ids is None else float(counts[ids.cpu()].sum() / counts.sum())
        self.teacher = self._teacher(model, corpus, head, teach)
        if saved is None and options.start == "target" and head.config.version == 1:
            start_from_text(
                head,
                self.teacher,
                [batch.tokens for batch in self.epochs.batches[:START_BATCHES]],
            )
        weights = [parameter for parameter in head.parameters() if parameter.requires_grad]
        self.learner = _Learner(
            head,
            weights,
            torch.optim.AdamW(
                weights,
                lr=options.learning_rate,
                betas=(0.9, 0.95),
                weight_decay=options.weight_decay,
            ),
            _average(head, options.average),
        )
        self.step, self.seconds = 0, 0.0
        if saved is not None:
            self._restore(saved)
        elif seconds is not None:
            self._choose_steps(seconds)
        if self.step == 0:
            count = sum(batch.tokens.numel() for batch in self.epochs.batches)
            self.progress(
                f"{head.config.kind} head, {sum(p.numel() for p in weights) / 1e6:.1f}M parameters, "
                f"loss {self.loss.name}, {count:,} tokens of text; the draft's vocabulary covers {coverage:.1%} "
                "of the answers"
            )

    def _teacher(
        self, model: PreTrainedModel | NativeLM, corpus: Corpus, head: EagleHead, teach: Teaching
    ) -> HeadTeacher:
        """Return what the head learns from: states that were kept, or the target on transformers' modules."""
        ids = head.config.feature_ids(self.target.lm.layers)
        if not isinstance(model, NativeLM):
            return teach(model, ids)
        states, along_text = (
            corpus.manifest.get("features"),
            not (self.loss.width or self.loss.regression),
        )
        weights, factors = Weights.of(model), family_of(model.config).factors(model.config)
        readable = head.vocabulary_head() is not None or (factors.divisor, factors.cap) == (1, 0)
        if states == list(ids) and along_text and readable:
            return StoredTeacher(self.target, ids, weights.vocabulary)
        why = (
            f"was kept with states {states}, {list(ids)} are needed"
            if along_text
            else "does not suffice for this loss"
        )
        self.progress(f"The text {why}: transformers runs the target again, which takes longer")
        return teach(model.model, ids)

    def _choose_steps(self, seconds: float) -> None:
        """Set the number of steps to what the time allows, by the pace of a few that change nothing."""
        took = []
        for batch in itertools.islice(self.epochs, PACED):
            began = time.perf_counter()
            self._backward(batch, measure=False)
            took.append(time.perf_counter() - began)
        steps = max(MIN_STEPS, int(PACED_SHARE * seconds / statistics.median(took)))
        self.options = replace(
            self.options, steps=steps, validate_every=max(1, steps // VALIDATIONS)
        )
        self.begun_as["options"] = _settings(self.options)
        self.progress(
            f"{steps:,} steps in {seconds / 3600:.1f} hours, {statistics.median(took):.2f} s each"
        )

    def train(self, until: int) -> None:
        options, learner = self.options, self.learner
        began, before = time.perf_counter(), self.seconds
        for batch in itertools.islice(self.epochs, self.step, until):
            rate = self._set_rate()
            measure = self.step % MEASURE_EVERY == 0
            report = self._backward(batch, measure=measure)
            norm = float(torch.nn.utils.clip_grad_norm_(learner.weights, options.clip))
            learner.optimizer.step()
            if learner.average is not None:
                learner.average.update_parameters(learner.head)
            self.step += 1
            self.seconds = before + time.perf_counter() - began
            last = self.step == until
            if measure or last:
                self._log(loss=float(report.loss.detach()), rate=rate, norm=norm, hits=report.hits)
            if self.step % options.validate_every == 0 or last:
                self._validate()
            if self.step % options.save_every == 0 and not last:
                self.save()
        self._finish()

    def _finish(self) -> None:
        """Fit temperatures to the trained head, and save it."""
        temperatures: tuple[float, ...] = ()
        if self.options.temperatures and self.epochs.held_back:
            temperatures = fit_temperatures(
                self.learner.result,
                self.teacher,
                self.epochs.held_back,
                autocast=self.options.autocast,
            )
            self._log(temperatures=temperatures)
            self.progress(f"temperatures by depth: {', '.join(map(str, temperatures))}")
        self.save(temperatures)

    def _backward(self, batch: Batch, *, measure: bool) -> Report:
        """Compute the gradients of one batch. Raise InputError if the loss is not finite."""
        device = self.teacher.device
        generator = torch.Generator(device).manual_seed(self.options.seed * 1_000_003 + self.step)
        reading = self.teacher.read_batch(
            batch.tokens.to(device), batch.pieces, keep_cache=self.loss.width > 0
        )
        with autocasting(device, enabled=self.options.autocast):
            report = loss_of(
                self.loss,
                self.learner.head,
                self.teacher,
                reading,
                batch.answers.to(device),
                generator=generator,
                measure=measure,
            )
        loss = float(report.loss.detach())
        require_input(
            f"learning_rate: the loss was {loss} at step {self.step}; use a lower learning rate",
            math.isfinite(loss),
        )
        self.learner.optimizer.zero_grad(set_to_none=True)
        report.loss.backward()
        return report

    def _set_rate(self) -> float:
        options = self.options
        warm = max(1, round(options.warmup * options.steps))
        share = (self.step - warm) / max(1, options.steps - warm)
        factor = (
            (self.step + 1) / warm if self.step < warm else 0.5 * (1 + math.cos(math.pi * share))
        )
        for group in self.learner.optimizer.param_groups:
            group["lr"] = options.learning_rate * factor
        return options.learning_rate * factor

    def _validate(self) -> None:
        validation = validate(
            self.learner.result,
            self.teacher,
            self.epochs.held_back or self.epochs.texts,
            autocast=self.options.autocast,
        )
        self._log(held_back=validation._asdict())
        ahead = " / ".join(f"{share:.0%}" for share in validation.hits)
        self.progress(
            f"step {self.step}: agreement 1 to {len(validation.hits)} tokens ahead {ahead}, "
            f"{validation.tokens_per_cycle:.2f} tokens per cycle of a chain"
        )

    # ---- on disk

    def save(self, temperatures: tuple[float, ...] = ()) -> None:
        dtype, (head, _, optimizer, average) = self.target.lm.dtype, self.learner
        state = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.learner.result.state_dict().items()
        }
        config = replace(head.config, temperatures=temperatures)
        save_head(config, state, self.out, verifier=Verifier(self.name or None))
        likeness.write(self.out, self.target.lm, self.name)
        with atomic(self.out / STATE) as temporary:
            torch.save(
                {
                    **self.begun_as,
                    "step": self.step,
                    "seconds": self.seconds,
                    "shards": self.epochs.shards,
                    "head": head.state_dict(),
                    "average": None if average is None else average.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
                temporary,
            )

    def _read_state(self) -> dict[str, Any] | None:
        file = self.out / STATE
        if not file.is_file():
            return None
        try:
            return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:
            raise InputError(
                f"out: {file} is damaged ({why_not_loaded(error)}); delete it to start again"
            ) from error

    def _require_same(self, saved: dict[str, Any] | None, *names: str) -> None:
        for field in names if saved else ():
            was, now = (saved or {})[field], self.begun_as[field]
            require_input(
                f"out: the training in {self.out} was begun with {field} {was}, got {now}; use the same, or another "
                "folder",
                was == now,
            )

    def _restore(self, saved: dict[str, Any]) -> None:
        head, _, optimizer, average = self.learner
        head.load_state_dict(saved["head"])
        optimizer.load_state_dict(saved["optimizer"])
        if average is not None:
            average.load_state_dict(saved["average"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        log = self.out / LOG
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.is_file() else []
        valid = [
            line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step
        ]
        write_whole(log, "".join(valid))
        self.progress(f"resuming at step {self.step} of {self.options.steps}")

    def _log(self, **values: Any) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        entry = {
            "step": self.step,
            "seconds": round(self.seconds, 1),
            # of this process, independent of other work on the machine
            "cpu_seconds": round(time.process_time(), 1),
            **values,
        }
        with (self.out / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        if "loss" in values and self.step % 50 == 1:
            remaining = (self.options.steps - self.step) * self.seconds / self.step
            self.progress(
                f"step {self.step}: loss {values['loss']:.3f}, {remaining / 60:.0f} min left"
            )


def _average(head: EagleHead, decay: float) -> AveragedModel | None:
    def moved(average: Tensor, now: Tensor, steps: Tensor | int) -> Tensor:
        return average.lerp(
            now.to(average.dtype), 1 - min(decay, float((1 + steps) / (10 + steps)))
        )

    return AveragedModel(head, avg_fn=moved) if decay else None


def _settings(options: TrainOptions) -> Any:
    """Return the options that change the result, as JSON has them."""
    settings = {name: value for name, value in asdict(options).items() if name not in HOUSEKEEPING}
    return json.loads(json.dumps(settings))


# ---- batches


class Batch(NamedTuple):
    """A batch.

    tokens   int64 [sequences, length]
    answers  bool [sequences, length]
    pieces   the texts, or their beginnings, that each sequence is made of
    """

    tokens: Tensor
    answers: Tensor
    pieces: list[list[Text]]


def pack(texts: Sequence[Text], options: TrainOptions) -> list[Batch]:
    """Return batches that contain every text once, in an order that depends on the seed.

    A sequence is filled with whole texts. If the next text does not fit, its beginning fills the sequence, and the next
    sequence starts with it again. A text longer than a sequence is cut. The first texts fill up the last batch.
    """
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(
        len(texts), generator=generator, dtype=torch.int64, device="cpu"
    ).tolist()
    batches: list[Batch] = []
    place = 0
    while place < len(order):
        length = options.lengths[len(batches) % len(options.lengths)]
        rows = []
        for _ in range(options.batch_tokens // length):
            row, place = _row(texts, order, place, length)
            rows.append(row)
        tokens, answers = (
            torch.stack([torch.cat([getattr(piece, name) for piece in row]) for row in rows])
            for name in ("tokens", "answers")
        )
        batches.append(Batch(tokens.long(), answers, rows))
    return batches


def _row(
    texts: Sequence[Text], order: list[int], place: int, length: int
) -> tuple[list[Text], int]:
    """Return the pieces of a sequence from `place` in the order, and the place after them."""
    pieces: list[Text] = []
    room = length
    while room:
        text = texts[order[place % len(order)]]
        if len(text.tokens) <= room or not pieces:
            place += 1
        pieces.append(text.begin(room))
        room -= len(pieces[-1].tokens)
    return pieces, place


class Epochs:
    """The batches of a training run, shuffled for every epoch.

    shards: numbers of those to read, so that a resumed run has the same text; None: all that there are
    """

    def __init__(
        self, corpus: Corpus, options: TrainOptions, shards: Sequence[int] | None = None
    ) -> None:
        self._seed = options.seed
        self.shards = corpus.numbers() if shards is None else list(shards)
        texts = [
            text for number in self.shards for text in corpus.read(number) if text.answers[2:].any()
        ]
        held_back = (
            min(MAX_HELD_BACK, math.ceil(options.held_back * len(texts))) if len(texts) > 1 else 0
        )
        self.held_back, self.texts = texts[:held_back], texts[held_back:]
        require_input(f"data: {corpus.folder} has no text with an answer", bool(self.texts))
        self.batches = [batch for batch in pack(self.texts, options) if batch.answers[:, 2:].any()]

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end."""
        for epoch in itertools.count():
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(
                len(self.batches), generator=generator, dtype=torch.int64, device="cpu"
            )
            yield from (self.batches[number] for number in order.tolist())
