"""Places of the channels, tokens, heads and layers of a small model in a large one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from research.inflate.shape import AttentionShape
from specengine.errors import InputError


@dataclass(frozen=True)
class Axis:
    """Places of the channels of a small axis in a large one.

    places, sources  int64 [n]: channel places[i] is the small channel sources[i]
    gaps             int64: places that must be zero even among random ones
    constants        places whose channel carries the constant, too small to be felt but by the weights that silence
    """

    small: int
    size: int
    places: Tensor
    sources: Tensor
    gaps: Tensor
    constants: tuple[int, ...] = ()

    @classmethod
    def leading(cls, small: int, size: int, *, constant: bool = False) -> Axis:
        """Return an axis with the small channels first and the constant one after them."""
        channels = torch.arange(small)
        return cls(small, size, channels, channels, channels[:0], (small,) if constant else ())

    def repeated(self, times: int) -> Axis:
        """Return this axis several times, side by side."""

        def shifted(channels: Tensor, by: int) -> Tensor:
            return torch.cat([channels + i * by for i in range(times)])

        return Axis(
            self.small * times,
            self.size * times,
            shifted(self.places, self.size),
            shifted(self.sources, self.small),
            shifted(self.gaps, self.size),
            tuple(place + i * self.size for i in range(times) for place in self.constants),
        )


def token_axis(small: int, size: int) -> Axis:
    """Return the axis of tokens: every token's row, then the rows of the rarer half repeated."""
    first = small - max(small // 2, 1)
    copies = first + torch.arange(size - small) % (small - first)
    places = torch.arange(size)
    return Axis(small, size, places, torch.cat([places[:small], copies]), places[:0])


class Heads(NamedTuple):
    """Axes of all heads' channels, [heads * head size], and the factor on queries."""

    queries: Axis
    keys: Axis
    query_scale: float


def place_heads(small: AttentionShape, large: AttentionShape) -> Heads:
    """Place each small key-value head with its queries in as many large ones as needed; InputError if too many."""
    times = large.head_dim // small.head_dim
    if large.head_dim % small.head_dim or (small.head_dim % 2 and times > 1):
        raise InputError(
            f"shape: heads of {large.head_dim} channels are no multiple of the model's {small.head_dim}, so rotary "
            "frequencies do not match"
        )
    group, room = small.heads // small.kv_heads, large.heads // large.kv_heads
    spread = -(-group // room)
    if small.kv_heads * spread > large.kv_heads:
        raise InputError(
            f"shape: {small.kv_heads} groups of {group} query heads need {small.kv_heads * spread} key-value heads "
            f"with up to {room} query heads each, the shape has {large.kv_heads}"
        )
    keys = [(j * spread + copy_, j) for j in range(small.kv_heads) for copy_ in range(spread)]
    queries = [
        ((j * spread + i // room) * room + i % room, j * group + i)
        for j in range(small.kv_heads)
        for i in range(group)
    ]
    return Heads(
        _head_axis(queries, small, large, True),
        _head_axis(keys, small, large, False),
        math.sqrt(times),
    )


def _head_axis(
    pairs: list[tuple[int, int]], small: AttentionShape, large: AttentionShape, queries: bool
) -> Axis:
    """Return the axis of a head. pairs: large head, and the small one in its place; other channels are gaps."""
    half, times = small.head_dim // 2, large.head_dim // small.head_dim
    channels = torch.arange(small.head_dim)
    within = channels // half * (large.head_dim // 2) + channels % half * times
    at, of = torch.tensor(pairs).T
    places = (at[:, None] * large.head_dim + within).flatten()
    used = (at[:, None] * large.head_dim + torch.arange(large.head_dim)).flatten()
    count, size = (small.heads, large.heads) if queries else (small.kv_heads, large.kv_heads)
    return Axis(
        count * small.head_dim,
        size * large.head_dim,
        places,
        (of[:, None] * small.head_dim + channels).flatten(),
        used[~torch.isin(used, places)],
    )


def layer_places(small: int, large: int) -> list[int]:
    """Place the small layers evenly among layers that change nothing, so that their inputs stay the same."""
    return [i * large // small for i in range(small)]
