"""Batches of training text, in the order of training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.errors import InputError
from specengine.train.draft.options import TrainOptions
from specengine.train.text.corpus import Corpus, Text

MAX_HELD_BACK = 32  # texts


class Batch(NamedTuple):
    """A batch. tokens: int64 [sequences, length]; answers: bool [sequences, length]."""

    tokens: Tensor
    answers: Tensor


def pack(texts: Sequence[Text], options: TrainOptions) -> list[Batch]:
    """Return batches that contain every text once, in an order that depends on the seed.

    A sequence is filled with whole texts. If the next text does not fit, its beginning fills the sequence, and the next
    sequence starts with it again. A text longer than a sequence is cut. The first texts fill up the last batch.
    """
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(len(texts), generator=generator, dtype=torch.int64, device="cpu").tolist()
    batches: list[Batch] = []
    place = 0
    while place < len(order):
        length = options.lengths[len(batches) % len(options.lengths)]
        rows = []
        for _ in range(options.batch_tokens // length):
            row, place = _row(texts, order, place, length)
            rows.append(row)
        batches.append(
            Batch(torch.stack([row.tokens for row in rows]).long(), torch.stack([row.answers for row in rows]))
        )
    return batches


def _row(texts: Sequence[Text], order: list[int], place: int, length: int) -> tuple[Text, int]:
    """Return a sequence of texts from `place` in the order, and the place after them."""
    pieces: list[Text] = []
    room = length
    while room:
        text = texts[order[place % len(order)]]
        if len(text.tokens) <= room or not pieces:
            place += 1
        pieces.append(Text(text.tokens[:room], text.answers[:room]))
        room -= len(pieces[-1].tokens)
    return Text(torch.cat([piece.tokens for piece in pieces]), torch.cat([piece.answers for piece in pieces])), place


class Epochs:
    """The batches of all epochs of a training run.

    New shards are packed into batches at the beginning of an epoch, so text may be written during the training. Batches
    keep their composition and are shuffled for every epoch. `shards` records the new shards of each epoch, so that a
    resumed run sees the same batches.
    """

    def __init__(self, corpus: Corpus, options: TrainOptions, shards: Sequence[Sequence[int]] = ()) -> None:
        self._corpus, self._options = corpus, options
        self.shards: list[list[int]] = []
        self.batches: list[Batch] = []
        self.held_back: list[Text] = []
        self._packed: list[int] = []  # number of batches of each epoch
        self._recorded = [list(numbers) for numbers in shards]
        self._begin()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield numbered batches without end. A batch keeps its number in all epochs."""
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
            taken = {number for numbers in self.shards for number in numbers}
            new = [number for number in self._corpus.numbers() if number not in taken]
        texts = [text for number in new for text in self._corpus.read(number) if text.answers[2:].any()]
        if epoch == 0:
            held_back = min(MAX_HELD_BACK, math.ceil(self._options.held_back * len(texts))) if len(texts) > 1 else 0
            self.held_back, texts = texts[:held_back], texts[held_back:]
            if not texts:
                raise InputError(f"data: {self._corpus.folder} has no text with an answer")
        self.batches += [batch for batch in pack(texts, self._options) if batch.answers[:, 2:].any()]
        self.shards.append(new)
        self._packed.append(len(self.batches))
