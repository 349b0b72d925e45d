"""Real cost without big weights: a small model and its head inside a model of any larger shape, with the same outputs.

Every tensor has the large shape and is read in full, so time and memory are the large model's; what the small model
does not fill is zero where it would be felt and random elsewhere, so acceptance is the small model's.

- Channels beyond the hidden size stay zero: nothing writes there (rows of o_proj, down_proj, embeddings). A norm over
  h channels among H sees a mean square smaller by h / H: its eps shrinks likewise, its weight by the square root.
- Rotary channel i of a head of size d turns as channel m * i of one of size m * d; queries grow by sqrt(m), for
  attention divides by the square root of the head size.
- A key-value head keeps its group of query heads; a group larger than the large model's gets copies of that head.
- More heads, intermediate channels and layers are random, and nothing reads them (zero o_proj and down_proj).
- More tokens: see `shape.ExtraTokens`. More draft columns are always silent, so the draft's choices stay the same.

Equal means to rounding: in bfloat16 the rescaled weights of norms and queries are rounded once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from research.inflate.head import large_head
from research.inflate.plan import plan_for
from research.inflate.shape import ExtraTokens, Shape
from research.inflate.target import large_target
from research.inflate.tensors import Maker
from specengine.checkpoints import eagle as checkpoints
from specengine.models.eagle import EagleConfig


class Inflated(NamedTuple):
    """A model and its head, if any, for `eagle_head.head_from`."""

    model: LlamaForCausalLM
    head_config: EagleConfig | None
    head_state: checkpoints.State | None


def inflate(
    model: PreTrainedModel,
    head_config: EagleConfig | None,
    head_state: Mapping[str, Tensor] | None,
    shape: Shape,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    *,
    extra_tokens: ExtraTokens = "copies",
    seed: int = 0,
) -> Inflated:
    """Inflate `model` (Llama) and its EAGLE head to `shape`, with the same outputs to rounding.

    Built layer by layer in `dtype` on `device`, so nothing is ever held twice. The head's layer has the sizes of the
    target's; the hidden states it reads are renumbered. The output layer is untied, for the embeddings' further
    channels must be zero. InputError or UnsupportedModelError where the small model does not fit into the shape.
    """
    maker = Maker(dtype, torch.device(device), torch.Generator(device).manual_seed(seed))
    plan = plan_for(model, head_config, shape, dtype, extra_tokens)
    target = large_target(model, plan, maker)
    if head_config is None or head_state is None:
        return Inflated(target, None, None)
    return Inflated(target, plan.head_config, large_head(head_config, head_state, plan, maker))
