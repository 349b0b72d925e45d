"""Attention of transformers' models over tree rows, by way of its AttentionInterface.

The keyword `tree` given to a model's forward reaches `tree_attention_forward`: the rows of a tree, or a prompt. Layers
with sliding windows see the last tokens alone: they are masked by position, as nodes stand in other slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specengine import ops
from specengine.models.kv_cache import KVCache, Rows
from specengine.ops import WORD_BITS, Slabs

ATTENTION = "specengine"
LARGEST_FLASH_HEAD = 256  # channels that flash-attn takes


@dataclass(eq=False)
class Prompt:
    """Visibility of consecutive tokens: each sees itself, those before it, and the `before` earlier tokens.

    windows: those that layers ask for, in order; None: a layer that sees everything.
    """

    before: int
    windows: list[int | None] = field(default_factory=list)
    _masks: dict[int | None, Any] = field(default_factory=dict)

    def packed_mask(self, rows: int, groups: int, query: Tensor, window: int | None = None) -> Any:
        """Return the mask in the form that `ops.tree_attention` reads fastest, made once per forward, or None.

        window: the number of last positions that each token sees; None: all.
        """
        if rows == 1 and window is None:
            return None
        if window not in self._masks:
            self._masks[window] = ops.pack_mask(
                prompt_mask(rows, self.before, query.device, window),
                groups,
                query.dtype,
                self.before if window is None else 0,
                causal=True,
            )
        return self._masks[window]


def prompt_mask(rows: int, before: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return what consecutive tokens see of all slots, bool [rows, before + rows]; window: as in `attend`."""
    mask = torch.ones(rows, before + rows, dtype=torch.bool, device=device).tril_(before)
    return mask if window is None else mask.triu_(before - window + 1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of what is seen as modules add it to scores: 0, or the least number; [1, 1, rows, slots]."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )[None, None]


class JoinedRows(NamedTuple):
    """Hold what the rows of several texts see, as many of each, and where they are stored; fields as those of Rows.

    words int64 [texts, rows, w]; prefix, live, seen int32 [texts]; slot int64 [texts].
    """

    words: Tensor
    prefix: Tensor
    live: Tensor
    seen: Tensor
    slot: Tensor

    @classmethod
    def of(cls, trees: Sequence[Any]) -> "JoinedRows | None":
        """Return those of several texts' Rows; None where these differ in shape, have windows, or sum strictly."""
        alike = len(trees) > 1 and all(
            isinstance(rows, Rows)
            and rows.words.shape == trees[0].words.shape
            and rows.places is None
            and rows.paths is None
            for rows in trees
        )
        if not alike:
            return None
        prefix, live, slot = (
            torch.cat([getattr(rows, name) for rows in trees])
            for name in ("prefix", "live", "slot")
        )
        nodes = (
            live
            if all(rows.seen is rows.live for rows in trees)
            else torch.cat([rows.seen for rows in trees])
        )
        return cls(torch.stack([rows.words for rows in trees]), prefix, live, nodes, slot)

    def attend(self, query: Tensor, slabs: Slabs, scale: float) -> Tensor:
        """Attend from rows, [heads, texts * rows, head size], over caches that hold theirs too."""
        return ops.lanes_attention(
            query, slabs, self.words, self.prefix, self.live, self.seen, scale
        )


@dataclass(eq=False)
class Joined:
    """Visibility of the rows of several texts, each over a cache of its own.

    caches, trees, counts: of each text, the latter the number of its rows; slabs: by layer, where attention may be one
    operation; stored: keys and values in its cache of the layer that runs
    """

    caches: list[KVCache]
    trees: list[Rows | Prompt]
    counts: list[int]
    slabs: Sequence[Slabs] = ()
    stored: list[Any] = field(default_factory=list)


class NeedsDenseMask(Exception):
    """This attention has a term that the tree attention does not know; the model's own must run."""


def tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Prompt | Rows | Joined | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, called by transformers' AttentionInterface. Without `tree`, run transformers' SDPA; on a CPU, run
    `last_row_attention` for single rows that see everything."""
    if isinstance(tree, Joined):
        kwargs |= {"attention_mask": attention_mask, "dropout": dropout, "scaling": scaling}
        return torch.cat(
            [
                tree_attention_forward(module, rows, keys, values, tree=own_tree, **kwargs)[0]
                for rows, (keys, values), own_tree in zip(
                    query.split(tree.counts, 2), tree.stored, tree.trees, strict=True
                )
            ],
            1,
        ), None
    unknown = [
        name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None
    ]
    if unknown or key.shape != value.shape:
        raise NeedsDenseMask(", ".join(unknown) or "keys and values of different sizes")
    if tree is None:
        if (
            query.shape[2] == 1
            and attention_mask is None
            and query.device.type == "cpu"
            and not dropout
        ):
            return last_row_attention(query, key, value, scaling), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0], None
    window = kwargs.get("sliding_window")
    if isinstance(tree, Rows):
        # contiguous: modules may view it
        return attend(query[0], key[0], value[0], tree, scaling, window).transpose(0, 1)[
            None
        ].contiguous(), None
    tree.windows.append(window)
    if window is not None and window >= key.shape[2]:
        window = None
    attended = prompt_attention(query, key, value, scaling, window)
    if attended is not None:
        return attended, None
    # not on a device, where torch may plan it anew for each length of a prompt
    if tree.before == 0 and window is None and query.device.type == "cpu" and query.shape[2] > 1:
        return sdpa_attention_forward(
            module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs
        )[0], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = tree.packed_mask(query.shape[2], query.shape[1] // key.shape[1], query, window)
    return ops.tree_attention(query[0], key[0], value[0], mask, scale).transpose(0, 1)[
        None
    ].contiguous(), None


@lru_cache(maxsize=1)
def flash_attention() -> Callable[..., Tensor] | None:
    """Return flash_attn_func of the package flash-attn; None if it is not installed, or not for this torch."""
    try:
        from flash_attn import flash_attn_func
    except (ImportError, OSError):  # a wheel for another torch fails to find its symbols
        return None
    return cast(Callable[..., Tensor], flash_attn_func)


def flash_takes(query: Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= LARGEST_FLASH_HEAD
    )


def prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None = None
) -> Tensor | None:
    """Attend from the last tokens of a sequence by flash-attn, without a mask in memory.

    query: [1, Hq, rows, D]; key, value: [1, Hkv, slots, D]; window: positions that a token sees, its own
    included; None: all. Returns [1, rows, Hq, D]; None where flash-attn does not take these, or is not there.
    """
    run = flash_attention() if flash_takes(query) else None
    if run is None:
        return None
    # with fewer queries than keys its causal mask is aligned with the last of both
    near = {} if window is None else {"window_size": (window - 1, 0)}
    return run(
        *(states.transpose(1, 2) for states in (query, key, value)),
        softmax_scale=scale,
        causal=True,
        **near,
    )


def last_row_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
) -> Tensor:
    """Attend from the last token of each sequence, as two products per KV head.

    torch's fused attention works in blocks of query rows: on a CPU, one row in half precision takes it ten times as
    long. query: [batch, Hq, 1, D]; key, value: [batch, Hkv, slots, D]. Returns [batch, 1, Hq, D].
    """
    batch, heads, _, size = query.shape
    scores = (
        query.reshape(batch, key.shape[1], heads // key.shape[1], size) @ key.transpose(-1, -2)
    ).to(torch.promote_types(query.dtype, torch.float32))
    scores = scores * (size**-0.5 if scale is None else scale)
    return (scores.softmax(dim=-1).to(value.dtype) @ value).reshape(batch, 1, heads, size)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend from rows, [heads, n, head size], over a cache, [KV heads, slots, head size], that holds theirs too.

    window: positions that a row sees, including itself; None: all.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if rows.paths is not None:
        return ops.strict_cached_attention(
            query, keys, values, rows.paths, rows.prefix, rows.live, scale
        )
    if window is not None and rows.places is not None:
        return attend_near(query, keys, values, rows, scale, window)
    if ops.is_free(rows.live):
        keys, values = keys[:, : rows.end], values[:, : rows.end]
        mask = rows.packed_mask(query.shape[0] // keys.shape[0], query.dtype)
        return ops.tree_attention(query, keys, values, mask, scale)
    return ops.cached_attention(
        query, keys, values, rows.words, rows.prefix, rows.live, rows.seen, scale
    )


# ---- sliding windows


def note_places(cache: KVCache, rows: Rows) -> None:
    """Tell the rows the position of each slot, which the cache notes for scratch that later rows see."""
    slots = torch.arange(cache.capacity, dtype=torch.int64, device=cache.slab.device)
    places = cache.places.index_copy_(0, rows.slot + slots[: len(rows)], rows.positions)
    rows.places = torch.where(slots < rows.prefix, slots, places)


def seen_by(
    tree: Rows | Prompt, rows: int, device: torch.device, window: int | None = None
) -> Tensor:
    """Return the slots that each of n rows sees, bool [n, slots], padding included."""
    if isinstance(tree, Prompt):
        return prompt_mask(rows, tree.before, device, window)
    mask = dense(tree, window)
    return pad(mask, (0, int(tree.slot) + rows - mask.shape[1]))


def dense(rows: Rows, window: int | None = None) -> Tensor:
    """Return the slots that each row sees, bool [n, end]; window: as in `attend`."""
    mask = rows.mask()
    if mask is None:
        mask = torch.ones(1, rows.end, dtype=torch.bool, device=rows.tokens.device)
    return (
        mask
        if window is None
        else mask & (cast(Tensor, rows.places)[: rows.end] > rows.positions[:, None] - window)
    )


def attend_near(
    query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int
) -> Tensor:
    """Attend as `attend`, each row to slots of the last `window` positions. Shapes as there."""
    groups = query.shape[0] // keys.shape[0]
    if not ops.is_free(rows.live):
        mask = _on_device(rows, keys.shape[1], window)
        unwritten = (
            torch.arange(keys.shape[1], device=keys.device, dtype=torch.int64)
            >= rows.slot + rows.live
        )
        (
            keys,
            values,
        ) = (  # zeros where fresh memory may hold NaN, which a mask does not keep out of a sum
            cache.masked_fill(unwritten[:, None], 0).repeat_interleave(groups, 0)
            for cache in (keys, values)
        )
        return scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, scale=scale
        )[0]
    if window not in rows.near:
        first = min(max(0, int(rows.positions.min()) - window + 1), int(rows.prefix))
        alone = len(rows) == 1 and rows.end == int(rows.prefix) + 1
        packed = (
            None if alone else ops.pack_mask(dense(rows, window)[:, first:], groups, query.dtype)
        )
        rows.near[window] = first, packed
    first, packed = rows.near[window]
    return ops.tree_attention(
        query, keys[:, first : rows.end], values[:, first : rows.end], packed, scale
    )


def _on_device(rows: Rows, slots: int, window: int) -> Tensor:
    """Return the mask as `dense`, bool [n, slots], of static shape and without a host read; padding sees itself."""
    place = torch.arange(slots, dtype=torch.int64, device=rows.tokens.device)
    node = place - rows.prefix
    bits = rows.words[:, (node // WORD_BITS).clamp(0, rows.words.shape[1] - 1)] >> (
        node % WORD_BITS
    )
    named = (bits & 1).bool() & (node < rows.seen) & (node < WORD_BITS * rows.words.shape[1])
    near = cast(Tensor, rows.places)[:slots] > rows.positions[:, None] - window
    return (((node < 0) | named) & near) | (place == (rows.slot + place[: len(rows)])[:, None])


AttentionInterface.register(ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
