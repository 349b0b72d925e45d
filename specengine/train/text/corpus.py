"""A folder of training text: token ids of conversations, and a mask of the answers that the target wrote."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specengine.train.text.shards import Contents, ShardFolder


class Text(NamedTuple):
    """A conversation. tokens: int32 [length]; answers: bool [length], true for tokens of answers."""

    tokens: Tensor
    answers: Tensor


class Corpus(ShardFolder):
    """A folder of texts, in shards."""

    FORMAT = 1
    MANIFEST = "corpus.json"
    contents = Contents("data", "training text", "the text in {} was", "write the text")

    def numbers(self) -> list[int]:
        return [int(file.name.split(".")[0]) for file in self.shards()]

    def add(self, number: int, texts: list[Text]) -> None:
        tensors = {
            "tokens": torch.cat([text.tokens for text in texts]).to(torch.int32),
            "answers": torch.cat([text.answers for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int64, device="cpu"),
        }
        self.save(number, tensors)

    def read(self, number: int) -> list[Text]:
        """Return the texts of a shard. Raise InputError if it is damaged."""
        return self.load(self.shard(number), _texts)

    def __iter__(self) -> Iterator[Text]:
        """Yield all texts, shard by shard. Raise InputError for a damaged shard."""
        return itertools.chain.from_iterable(map(self.read, self.numbers()))


def _texts(tensors: dict[str, Tensor]) -> list[Text]:
    tokens, answers, lengths = (tensors[name] for name in ("tokens", "answers", "lengths"))
    if not len(tokens) == len(answers) == int(lengths.sum()):
        raise ValueError("its tensors have different lengths")
    pieces = [split.split(lengths.tolist()) for split in (tokens, answers)]
    return [Text(*text) for text in zip(*pieces, strict=True)]
