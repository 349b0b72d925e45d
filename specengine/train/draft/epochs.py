"""The order in which a draft sees its text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.train.options import TrainOptions
from specengine.train.text.corpus import Corpus, Text

MOST_HELD_BACK = 32  # texts


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
    order = torch.randperm(len(texts), generator=generator, dtype=torch.int64, device="cpu").tolist()
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
            for number in torch.randperm(
                self._packed[epoch], generator=generator, dtype=torch.int64, device="cpu"
            ).tolist():
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
