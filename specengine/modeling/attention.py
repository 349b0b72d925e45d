"""Attention of transformers' models over tree rows, by way of its AttentionInterface.

The keyword `tree` given to a model's forward reaches `_tree_attention_forward`: what the rows see, or padded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specengine import ops
from specengine.cuda_graphs import Rows

ATTENTION = "specengine"
LARGEST_FLASH_HEAD = 256  # channels that flash-attn takes


@dataclass
class Visibility:
    """Which cache slots each row of a forward sees.

    mask      bool [rows, slots], or None where every row sees every slot, or where `causal` says it
    prefix    how many slots at the start every row of the mask sees, as far as is known
    causal    rows are the first tokens of the sequence and see themselves and what stands before
    in_order  rows are consecutive tokens, the last of the sequence, and see themselves and what stands before
    strict    a row's attention shall not depend on the rows around it
    """

    mask: Tensor | None = None
    causal: bool = False
    in_order: bool = False
    strict: bool = False
    prefix: int = 0
    packed: Any = None  # the mask as ops.tree_attention is fastest with, made once per forward

    def for_groups(self, groups: int, dtype: torch.dtype) -> Any:
        if self.packed is None and self.mask is not None:
            self.packed = ops.pack_mask(self.mask, groups, dtype, self.prefix)
        return self.packed


def causal_rows(rows: int, before: int, device: torch.device) -> Visibility:
    """Visibility of `rows` consecutive tokens behind `before` others."""
    if rows == 1:
        return Visibility()
    if before == 0:
        return Visibility(causal=True, in_order=True)
    return Visibility(lower_right(rows, before, device), prefix=before, in_order=True)


def lower_right(rows: int, before: int, device: torch.device) -> Tensor:
    return torch.ones(rows, before + rows, dtype=torch.bool, device=device).tril_(before)


class NeedsDenseMask(Exception):
    """This attention has a term that the tree attention does not know; the model's own must run."""


def _tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Visibility | Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' AttentionInterface; calls without `tree` get transformers' SDPA, untouched."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or key.shape != value.shape:
        raise NeedsDenseMask(", ".join(unknown) or "keys and values of different sizes")
    if isinstance(tree, Rows):
        return attend_padded(query[0], key[0], value[0], tree, scaling).transpose(0, 1)[None], None
    if tree is not None and tree.in_order:
        found = prompt_attention(query, key, value, scaling)
        if found is not None:
            return found, None
    if tree is None or tree.causal:
        mask = None if tree is not None else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree.strict:
        out = ops.strict_attention(query[0], key[0], value[0], tree.mask, scale)
    else:
        out = ops.tree_attention(query[0], key[0], value[0], tree.for_groups(groups, query.dtype), scale)
    return out.transpose(0, 1)[None], None


@lru_cache(maxsize=1)
def flash_attention() -> Callable[..., Tensor] | None:
    """flash_attn_func of the package flash-attn; None where it is not installed, or not for this torch."""
    try:
        from flash_attn import flash_attn_func
    except (ImportError, OSError):  # a wheel for another torch fails to find its symbols
        return None
    return flash_attn_func


def flash_takes(query: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and query.shape[-1] <= LARGEST_FLASH_HEAD


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """Attention of consecutive tokens, the last of the sequence, by flash-attn, without a mask in memory.

    query: [1, Hq, rows, D]; key, value: [1, Hkv, slots, D]. Returns [1, rows, Hq, D]; None where flash-attn does not
    take these, or is not there.
    """
    run = flash_attention() if flash_takes(query) else None
    if run is None:
        return None
    # with fewer queries than keys its causal mask is aligned with the last of both
    return run(*(states.transpose(1, 2) for states in (query, key, value)), softmax_scale=scale, causal=True)


def attend_padded(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float | None = None) -> Tensor:
    """Attention of padded rows, [heads, rows, head size], over a slab, [KV heads, capacity, head size]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if rows.paths is not None:
        return ops.strict_cached_attention(query, keys, values, rows.paths, rows.prefix, rows.live, scale)
    return ops.cached_attention(query, keys, values, rows.words, rows.prefix, rows.live, rows.seen, scale)


AttentionInterface.register(ATTENTION, _tree_attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
