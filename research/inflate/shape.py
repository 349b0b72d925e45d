"""The shape to inflate to, and what stands for the tokens that the small model does not have."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specengine.errors import InputError

# What stands for the tokens that the small model does not have.
#   copies  rows of rare tokens (the later half of the ids: merges come in order of frequency) once more. A copy's
#           logit equals its original's, whose id is lower, so greedy answers stay the same; sampled ones do not.
#   silent  logits below -2 ** 19, so that sampled answers stay the same as well. They come from one channel that
#           carries a constant, so small that no norm feels it.
ExtraTokens = Literal["copies", "silent"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model.

    head_dim     None: hidden / heads
    draft_vocab  columns of a head that drafts a part of the vocabulary; None: as many as it has. A head that drafts
                 all of the small model's tokens has a column for each of the large one's.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int | None = None
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.hidden % self.heads:
            raise InputError(
                f"shape: {self.heads} heads must be a multiple of {self.kv_heads} key-value heads, and hidden size "
                f"{self.hidden} one of the heads"
            )

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim or self.hidden // self.heads)


SHAPES = {
    "8b": Shape(
        4096, 32, 32, 8, 14336, 128256, draft_vocab=32000
    ),  # Llama 3.1 and its EAGLE-3 head
    "135m": Shape(576, 30, 9, 3, 1536, 49152, draft_vocab=16384),  # SmolLM2
    "tiny": Shape(64, 4, 4, 2, 128, 2048, draft_vocab=1024),
}


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


def parse_shape(text: str) -> Shape:
    """Parse a name of SHAPES, or sizes in the order of Shape's fields, separated by x."""
    if text in SHAPES:
        return SHAPES[text]
    sizes = text.split("x")
    if len(sizes) not in (6, 7, 8) or not all(size.isdigit() and int(size) for size in sizes):
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(
            f"{text!r}: accepted: {known} and HIDDENxLAYERSxHEADSxKVHEADSxINTERMEDIATExVOCAB[xHEADDIM[xDRAFTVOCAB]]"
        )
    return Shape(*map(int, sizes))
