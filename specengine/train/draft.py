"""Training an EAGLE draft head on text that the target wrote."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.drafters.eagle import Eagle
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.models.checkpoints import load_head, save_head
from specengine.models.eagle_head import (
    DEFAULT_THETA,
    ROPE_TYPES,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    default_layer_ids,
    head_from,
    make_head,
)
from specengine.policies.eagle import Eagle as EaglePolicy
from specengine.targets.huggingface import HuggingFaceTarget
from specengine.train.corpus import Corpus, Text, atomic, replace_file
from specengine.train.curve import plot
from specengine.train.losses import Loss, Report, loss_of, make_loss
from specengine.train.teacher import Reading, Teacher

STATE, LOG, CURVE = "training.pt", "log.jsonl", "curve.svg"
MEASURED_STEPS = 5  # of the agreement on held-back text
MOST_HELD_BACK = 32  # texts
MEASURE_EVERY = 10  # steps
WRITTEN_PROMPTS, WRITTEN_TOKENS = 6, 48  # of the acceptance length in the loop

Progress = Callable[[str], None]


@dataclass(frozen=True)
class TrainOptions:
    """How a draft is trained.

    head              eagle1 or eagle3; auto: what the loss is made for
    steps             optimiser steps
    batch_tokens      of a step; a sequence at least
    lengths           of the sequences, in tokens, taken in turn: whole texts one behind the other, so that a draft of
                      short texts knows long contexts too
    learning_rate     at its peak, after `warmup` (a share of the steps); falls to 0 on a cosine
    clip              norm that the gradient is scaled down to
    draft_vocab_size  of an EAGLE-3 head: the most frequent tokens of the answers; 0: all of the target's
    kv_heads          of the draft's attention; 0: as many as the target has
    intermediate_size of the draft's MLP; 0: the target's
    start             target: from the target's head, final norm and last layer; random; or the path of a head
    autocast          run in bfloat16 where the weights are kept in float32
    held_back         share of the texts that nothing is learnt from
    keep_gib          GiB of main memory for the target's hidden states, which later epochs need not compute again
    validate_every, save_every   steps
    """

    head: Literal["auto", "eagle1", "eagle3"] = "auto"
    steps: int = 2000
    batch_tokens: int = 2048
    lengths: tuple[int, ...] = (512, 1024, 512, 2048)
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip: float = 0.5
    draft_vocab_size: int = 8192
    kv_heads: int = 0
    intermediate_size: int = 0
    start: str = "target"
    autocast: bool = True
    held_back: float = 0.02
    keep_gib: float = 6.0
    validate_every: int = 200
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_tokens": 8, "draft_vocab_size": 0, "kv_heads": 0, "intermediate_size": 0}
        for name, value in (least | {"validate_every": 1, "save_every": 1, "seed": 0}).items():
            if getattr(self, name) < value:
                raise InputError(f"{name}: got {getattr(self, name)}, accepted {value} or more")
        if not self.lengths or min(self.lengths) < 8 or max(self.lengths) > self.batch_tokens:
            raise InputError(f"lengths: got {self.lengths}, accepted 8 to batch_tokens = {self.batch_tokens} each")
        if self.head not in ("auto", "eagle1", "eagle3"):
            raise InputError(f"head: got {self.head!r}, accepted auto, eagle1, eagle3")
        for name, low in {"learning_rate": True, "clip": True, "weight_decay": False, "keep_gib": False}.items():
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (low and value == 0):
                raise InputError(f"{name}: got {value}, accepted {'above 0' if low else '0 or more'}")
        for name in ("warmup", "held_back"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name}: got {getattr(self, name)}, accepted 0 to below 1")


class Validation(NamedTuple):
    """hits[j]: share of held-back answer tokens that the draft's best guess j + 1 tokens ahead is the target's;
    overlap[j]: acceptance rate of a draft that samples; acceptance_length: mean tokens per cycle when it serves."""

    hits: list[float]
    overlap: list[float]
    acceptance_length: float


def train_draft(
    model: PreTrainedModel,
    corpus: Corpus,
    out: Path,
    options: TrainOptions,
    loss: Loss | None = None,
    *,
    name: str = "",
    stop_after: int | None = None,
    progress: Progress = lambda line: None,
) -> Path:
    """Train a head for `model` into the folder `out`, which holds a head that serves from the first saving on.

    Interrupted, the same call goes on where it last saved and comes to the same curve. stop_after: end at this step
    of the schedule. InputError for text of another target, and for a folder that was begun in another way.
    """
    loss = loss or make_loss("ttt")
    run = _Run(model, corpus, out, options, loss, name, progress)
    run.train(min(stop_after or options.steps, options.steps))
    return out


def new_head(model: PreTrainedModel, options: TrainOptions, loss: Loss, counts: Tensor) -> EagleHead:
    """A head for `model` to be trained, float32. counts: int64 [vocabulary], of each token in the answers."""
    device = model.get_input_embeddings().weight.device
    if options.start not in ("target", "random"):
        config, state, _ = load_head(options.start)
        head = head_from(config, state, torch.float32, device).train().requires_grad_(True)
        if config.own_embeddings:
            head.embed_tokens.requires_grad_(False)
        return head
    version = {"eagle1": 1, "eagle3": 3}.get(options.head) or (1 if loss.name in ("eagle", "hass") else 3)
    config = new_config(model, version, options)
    torch.manual_seed(options.seed)
    head = make_head(config).to(device)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    if isinstance(head, Eagle3Head):
        _choose_vocabulary(head, counts)
    if options.start == "target":
        _start_from_target(head, model)
    return head


def new_config(model: PreTrainedModel, version: int, options: TrainOptions) -> EagleConfig:
    target = model.config.get_text_config(decoder=True)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    heads = target.num_attention_heads
    rope = dict(getattr(target, "rope_parameters", None) or {})
    if rope.get("rope_type") not in ROPE_TYPES:
        rope = {"rope_type": "default", "rope_theta": DEFAULT_THETA}
    kv_heads = options.kv_heads or getattr(target, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise InputError(f"kv_heads: got {kv_heads}, accepted divisors of the {heads} heads")
    own_vocabulary = version == 3 and options.draft_vocab_size
    return EagleConfig(
        version=version,  # type: ignore[arg-type]
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        target_hidden_size=target.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=min(options.draft_vocab_size, vocab_size) if own_vocabulary else vocab_size,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=max(2048, *options.lengths),
        layer_ids=default_layer_ids(target.num_hidden_layers) if version == 3 else None,
        fc_bias=version == 1,
    )


def _choose_vocabulary(head: Eagle3Head, counts: Tensor) -> None:
    """The draft's vocabulary: the most frequent tokens, by id."""
    if head.d2t is None:
        return
    size = head.config.draft_vocab_size
    best = counts.argsort(descending=True, stable=True)[:size].sort().values
    head.d2t.copy_(best.to(head.d2t.device) - torch.arange(size, device=head.d2t.device))


@torch.no_grad()
def _start_from_target(head: EagleHead, model: PreTrainedModel) -> None:
    """Copy what the target already knows wherever a weight of the same shape and meaning is found.

    The fusion starts as the highest hidden state. In an EAGLE-3 head the target's last layer becomes the head's,
    reading the hidden state alone at first, and its final norm and its head's rows become those of the head. An
    EAGLE-1 head has no norm in front of its attention, so a layer of the target would see inputs of a wrong scale.
    """
    config, size = head.config, head.config.hidden_size
    ids = head.target_ids()
    vocabulary = head.vocabulary_head()
    if vocabulary is not None:
        rows = model.get_output_embeddings().weight
        vocabulary.weight.copy_(rows if ids is None else rows[ids])
    states = dict(model.get_decoder().named_parameters()) if config.version == 3 else {}
    last = f"layers.{model.config.get_text_config(decoder=True).num_hidden_layers - 1}."
    layer = dict(head.layers.named_parameters())
    for name, parameter in layer.items():
        source = states.get(last + name.removeprefix("0."))
        if name == "0.hidden_norm.weight":
            source = states.get(last + "input_layernorm.weight")
        if source is None or source.ndim != parameter.ndim or source.shape[0] != parameter.shape[0]:
            continue
        if source.shape == parameter.shape:
            parameter.copy_(source)
        elif parameter.ndim == 2 and parameter.shape[1] == 2 * source.shape[1]:
            parameter[:, source.shape[1] :] = source
    norm, final = getattr(head, "norm", None), states.get("norm.weight")
    if norm is not None and final is not None and final.shape == norm.weight.shape:
        norm.weight.copy_(final)
    head.fc.weight[:, -size:] += torch.eye(size, device=head.fc.weight.device)
    if config.fc_bias:
        head.fc.bias.zero_()


# ---------------------------------------------------------------------------------------------------- batches


class Batch(NamedTuple):
    """int64 and bool [sequences, length]."""

    tokens: Tensor
    answers: Tensor


def pack(texts: Sequence[Text], options: TrainOptions) -> list[Batch]:
    """Batches that hold every text once: whole texts one behind the other, in an order that the seed decides.

    A text that does not fit any more fills its sequence with its beginning, and begins the next one. One that is
    longer than a sequence is cut. The last batch is filled up from the beginning.
    """
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(texts), generator=generator).tolist()
    found: list[Batch] = []
    place = 0
    while place < len(order):
        length = options.lengths[len(found) % len(options.lengths)]
        rows = []
        for _ in range(options.batch_tokens // length):
            row, place = _row(texts, order, place, length)
            rows.append(row)
        found.append(
            Batch(torch.stack([row.tokens for row in rows]).long(), torch.stack([row.answers for row in rows]))
        )
    return found


def _row(texts: Sequence[Text], order: list[int], place: int, length: int) -> tuple[Text, int]:
    """A sequence of texts from `place` of the order on, and the place behind them."""
    parts: list[Text] = []
    room = length
    while room:
        text = texts[order[place % len(order)]]
        if len(text.tokens) <= room or not parts:
            place += 1
        parts.append(Text(text.tokens[:room], text.answers[:room]))
        room -= len(parts[-1].tokens)
    return Text(torch.cat([part.tokens for part in parts]), torch.cat([part.answers for part in parts])), place


class Epochs:
    """The order in which a training run sees its text.

    The shards that are there when an epoch begins are packed into batches, which keep their composition and are
    shuffled anew for every epoch: text may be written while a draft trains on it. `shards` records which shards
    came in with each epoch, so that a run that goes on later sees the same.
    """

    def __init__(self, corpus: Corpus, options: TrainOptions, shards: Sequence[Sequence[int]] = ()) -> None:
        self._corpus, self._options = corpus, options
        self.shards: list[list[int]] = []
        self.batches: list[Batch] = []
        self.held_back: list[Text] = []
        self._packed: list[int] = []  # batches that each epoch has
        self._recorded = [list(numbers) for numbers in shards]
        self._begin()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Numbered batches without end; the number is the batch's for good."""
        epoch = 0
        while True:
            if epoch >= len(self.shards):
                self._begin()
            generator = torch.Generator().manual_seed(self._options.seed * 1_000_003 + epoch)
            for number in torch.randperm(self._packed[epoch], generator=generator).tolist():
                yield number, self.batches[number]
            epoch += 1

    def _begin(self) -> None:
        epoch = len(self.shards)
        if epoch < len(self._recorded):
            new = self._recorded[epoch]
        else:
            known = {number for numbers in self.shards for number in numbers}
            new = [number for number in self._corpus.numbers() if number not in known]
        texts = [text for number in new for text in self._corpus.read(number) if text.answers[2:].any()]
        if epoch == 0:
            held = min(MOST_HELD_BACK, math.ceil(self._options.held_back * len(texts))) if len(texts) > 1 else 0
            self.held_back, texts = texts[:held], texts[held:]
            if not texts:
                raise InputError(f"data: {self._corpus.folder} holds no text with an answer")
        self.batches += [batch for batch in pack(texts, self._options) if batch.answers[:, 2:].any()]
        self.shards.append(new)
        self._packed.append(len(self.batches))


# ---------------------------------------------------------------------------------------------------- the loop


class _Run:
    def __init__(
        self,
        model: PreTrainedModel,
        corpus: Corpus,
        out: Path,
        options: TrainOptions,
        loss: Loss,
        name: str,
        progress: Progress,
    ) -> None:
        vocab_size = model.get_input_embeddings().weight.shape[0]
        if corpus.manifest.get("vocab_size") != vocab_size:
            raise InputError(
                f"data: it is text of {corpus.manifest.get('target')!r} with a vocabulary of "
                f"{corpus.manifest.get('vocab_size')}; this target has {vocab_size}"
            )
        self.model, self.out, self.options, self.loss, self.progress = model, out, options, loss, progress
        self.name, self.log = name, out / LOG
        saved = self._read_state()
        self.begun_as = {"options": json.loads(json.dumps(asdict(options))), "loss": asdict(loss)}
        if saved is not None:
            self._require_same(saved)
        self.epochs = Epochs(corpus, options, saved["shards"] if saved else ())
        self.begun_as["text"] = _fingerprint(self.epochs.batches)
        if saved is not None:
            self._require_same(saved, "text")
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for batch in self.epochs.batches:
            counts += batch.tokens[batch.answers].bincount(minlength=vocab_size)
        self.head = new_head(model, options, loss, counts)
        self.coverage = self._coverage(counts)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.teacher = Teacher(model, self.head.config.feature_ids(layers))
        self.readings = _Readings(self.teacher, options.keep_gib)
        self.learns = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.learns, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self.step, self.seconds = 0, 0.0
        if saved is not None:
            self._restore(saved)

    def train(self, until: int) -> None:
        options = self.options
        if self.step == 0:
            tokens = sum(batch.tokens.numel() for batch in self.epochs.batches)
            self.progress(
                f"EAGLE-{self.head.config.version} head, {sum(p.numel() for p in self.learns) / 1e6:.1f}M parameters, "
                f"loss {self.loss.name}, {tokens:,} tokens of text; the draft's vocabulary holds {self.coverage:.1%} "
                "of the answers"
            )
        began, before = time.perf_counter(), self.seconds
        for number, batch in islice(self.epochs, self.step, until):
            rate = self._set_rate()
            measure = self.step % MEASURE_EVERY == 0
            report = self._backward(number, batch, measure=measure)
            norm = float(torch.nn.utils.clip_grad_norm_(self.learns, options.clip))
            self.optimizer.step()
            self.step += 1
            self.seconds = before + time.perf_counter() - began
            last = self.step == until
            if measure or last:
                self._log(loss=float(report.loss.detach()), rate=rate, norm=norm, hits=report.hits)
            if self.step % options.validate_every == 0 or last:
                self._log_validation(self.validate())
            if self.step % options.save_every == 0 or last:
                self.save()
        if self.log.is_file():
            plot(self.log, self.out / CURVE)

    def _backward(self, number: int, batch: Batch, *, measure: bool) -> Report:
        """Gradients of one batch; InputError where the loss is not finite any more."""
        device = self.teacher.device
        generator = torch.Generator(device).manual_seed(self.options.seed * 1_000_003 + self.step)
        reading = self.readings.get(number, batch.tokens.to(device), keep_cache=self.loss.width > 0)
        with _autocast(device, enabled=self.options.autocast):
            report = loss_of(
                self.loss,
                self.head,
                self.teacher,
                reading,
                batch.answers.to(device),
                generator=generator,
                measure=measure,
            )
        if not math.isfinite(float(report.loss.detach())):
            raise InputError(
                f"learning_rate: the loss was {float(report.loss.detach())} at step {self.step}; take a lower one"
            )
        self.optimizer.zero_grad(set_to_none=True)
        report.loss.backward()
        return report

    def _set_rate(self) -> float:
        options = self.options
        warm = max(1, round(options.warmup * options.steps))
        share = (self.step - warm) / max(1, options.steps - warm)
        factor = (self.step + 1) / warm if self.step < warm else 0.5 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * factor
        return options.learning_rate * factor

    # ---- validation

    def validate(self) -> Validation:
        texts = self.epochs.held_back or _as_texts(self.epochs.batches[0])
        hits, overlap = agreement(self.head, self.teacher, texts, autocast=self.options.autocast)
        prompts = [prompt for text in texts if (prompt := _question(text))]
        return Validation(hits, overlap, acceptance_length(self.model, self.head, prompts[:WRITTEN_PROMPTS]))

    # ---- on disk

    def save(self) -> None:
        dtype = self.model.dtype
        state = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self.head.state_dict().items()
        }
        save_head(self.head.config, state, self.out, target=self.name or None)
        with atomic(self.out / STATE) as part:
            torch.save(
                {
                    **self.begun_as,
                    "step": self.step,
                    "seconds": self.seconds,
                    "shards": self.epochs.shards,
                    "head": self.head.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                },
                part,
            )

    def _read_state(self) -> dict[str, Any] | None:
        file = self.out / STATE
        if not file.is_file():
            return None
        try:
            return torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:
            raise InputError(f"out: {file} is damaged ({error}); delete it to begin anew") from error

    def _require_same(self, saved: dict[str, Any], *names: str) -> None:
        for field in names or self.begun_as:
            if saved[field] != self.begun_as[field]:
                raise InputError(
                    f"out: the training in {self.out} was begun with {field} {saved[field]}, got "
                    f"{self.begun_as[field]}; go on with the same, or take another folder"
                )

    def _restore(self, saved: dict[str, Any]) -> None:
        self.head.load_state_dict(saved["head"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True) if self.log.is_file() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
        replace_file(self.log, "".join(kept).encode())
        self.progress(f"going on at step {self.step} of {self.options.steps}")

    def _log(self, **values: Any) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        entry = {"step": self.step, "seconds": round(self.seconds, 1), **values}
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
        if "loss" in values and self.step % 50 == 1:
            left = (self.options.steps - self.step) * self.seconds / self.step
            self.progress(f"step {self.step}: loss {values['loss']:.3f}, {left / 60:.0f} min left")

    def _log_validation(self, found: Validation) -> None:
        self._log(held_back=found._asdict())
        ahead = " / ".join(f"{share:.0%}" for share in found.hits)
        self.progress(
            f"step {self.step}: agreement 1 to {len(found.hits)} tokens ahead {ahead}, "
            f"acceptance length {found.acceptance_length:.2f}"
        )

    def _coverage(self, counts: Tensor) -> float:
        ids = self.head.target_ids()
        return 1.0 if ids is None else float(counts[ids.cpu()].sum() / counts.sum())


@torch.no_grad()
def agreement(
    head: EagleHead, teacher: Teacher, texts: Sequence[Text], *, autocast: bool
) -> tuple[list[float], list[float]]:
    """Hits and overlap (see Validation) along the texts' answers, which the draft is told token by token."""
    measuring = make_loss("ttt", steps=MEASURED_STEPS)
    sums = torch.zeros(2, MEASURED_STEPS, dtype=torch.float64)
    counted = 0
    for text in texts:
        reading = teacher.read(text.tokens.long().to(teacher.device)[None])
        with _autocast(teacher.device, enabled=autocast):
            found = loss_of(measuring, head, teacher, reading, text.answers.to(teacher.device)[None], measure=True)
        weight = int(text.answers.sum())
        sums += weight * torch.tensor([found.hits, found.overlap], dtype=torch.float64)
        counted += weight
    hits, overlap = (sums / counted).tolist()
    return hits, overlap


@torch.no_grad()
def acceptance_length(model: PreTrainedModel, head: EagleHead, prompts: Sequence[list[int]]) -> float:
    """Mean tokens per cycle, greedy, with EAGLE's tree of 60 nodes; 0 where there is no prompt."""
    serving = head_from(head.config, head.state_dict(), model.dtype, model.get_input_embeddings().weight.device)
    target = HuggingFaceTarget(model, pack=False)
    engine = Engine(target, Eagle(serving, target.lm, pack=False), EaglePolicy(width=10, expansions=6, budget=60))
    tokens = cycles = 0
    for prompt in prompts:
        stats = engine.generate(prompt, max_new_tokens=WRITTEN_TOKENS, temperature=0.0).stats
        tokens, cycles = tokens + stats.num_generated_tokens, cycles + stats.num_spec_steps
    return tokens / cycles if cycles else 0.0


def _question(text: Text) -> list[int]:
    """What stands before the text's first answer."""
    return text.tokens[: int(text.answers.int().argmax())].tolist()


def _as_texts(batch: Batch) -> list[Text]:
    return [Text(*row) for row in zip(batch.tokens, batch.answers, strict=True)]


def _fingerprint(batches: Sequence[Batch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.tokens.numpy().tobytes())
    return digest.hexdigest()[:16]


class _Readings:
    """The teacher's readings, kept in memory from one epoch to the next as far as `gib` reach."""

    def __init__(self, teacher: Teacher, gib: float) -> None:
        self._teacher = teacher
        self._kept: dict[int, Reading] = {}
        self._room = gib * 2**30

    def get(self, number: int, tokens: Tensor, *, keep_cache: bool) -> Reading:
        if number in self._kept:
            return self._kept[number]._replace(tokens=tokens).to(tokens.device)
        reading = self._teacher.read(tokens, keep_cache=keep_cache)
        size = reading.features.nbytes + reading.states.nbytes
        if size <= self._room and not keep_cache:  # a tree needs the keys and values too, which are far larger
            self._kept[number] = reading.to(torch.device("cpu"))
            self._room -= size
        return reading


def _autocast(device: torch.device, *, enabled: bool) -> Any:
    return torch.autocast(device.type, dtype=torch.bfloat16) if enabled else nullcontext()
