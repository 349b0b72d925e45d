"""Tensor parallel: one process a rank, as torchrun starts them, and weights split by the model's own plan."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import embedding, linear
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specengine.errors import InputError, UnsupportedModelError
from specengine.modeling.causal_lm import CausalLM

FOREVER = timedelta(days=365)  # between two commands; a rank that dies closes its connections at once
WHOLE = "replicate"  # transformers' name of not splitting


class Ranks(NamedTuple):
    """The processes of a run. control: the group that commands go through, on the host."""

    own: int
    size: int
    control: Any


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def require_launched() -> None:
    """InputError where this process has no ranks beside it."""
    if not launched():
        raise InputError(
            "tp_plan: this process is alone; start it by torchrun --nproc-per-node N, which sets WORLD_SIZE and RANK"
        )
    if dist.is_available() and dist.is_initialized() and _TAKEN:
        raise InputError("tp_plan: these ranks serve an engine already; accepted one for each run of torchrun")


def splitting(config: PretrainedConfig) -> Any:
    """What `from_pretrained(distributed_config=...)` takes for this model over the ranks there are.

    Attention stays whole on each rank where its heads cannot be dealt out evenly. UnsupportedModelError where the model
    has no plan.
    """
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise UnsupportedModelError("tp_plan: it needs transformers 5.18 or newer") from error
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    plan: dict[str, str] = getattr(shape, "_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModelError(f"tp_plan: {type(shape).__name__} has no plan of its own in transformers")
    count = int(os.environ["WORLD_SIZE"])
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    whole = {name: WHOLE for name in plan if ".self_attn" in name} if any(one % count for one in heads) else {}
    units = getattr(text, "intermediate_size", None)
    if units and units % count:
        raise UnsupportedModelError(f"tp_plan: {units} units of a layer's MLP cannot be dealt out to {count} ranks")
    return DistributedConfig(tp_size=count, tp_plan=whole or "auto")


_TAKEN: list[Ranks] = []


def ranks() -> Ranks:
    """Those of this run, once the model is split over them."""
    if not _TAKEN:
        control = dist.new_group(backend="gloo", timeout=FOREVER)
        _TAKEN.append(Ranks(dist.get_rank(), dist.get_world_size(), control))
    return _TAKEN[0]


class ShardedLM(CausalLM):
    """A model that runs on all ranks together. Rank 0, which drafts, has its embeddings and its head whole as well."""

    def __init__(self, model: PreTrainedModel, *, pack: bool | None = None, compile_blocks: bool = False) -> None:
        super().__init__(model, pack=False)
        head = model.get_output_embeddings()
        tables = [model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
        self._tables = [_whole(table) for table in tables]  # by all ranks at once
        if dist.get_rank():
            self._tables = []

    def _watched(self) -> None:
        """Return nothing: weights of which each rank holds a part are read at loading alone."""

    def _own_twin(self) -> PreTrainedModel:
        return self.model.eval()  # whose modules transformers has tied to its ranks

    @property
    def table(self) -> Tensor:
        found = self._tables[0]
        assert found is not None
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.table)

    def head(self, states: Tensor) -> Tensor:
        weight = self._tables[1]
        assert weight is not None
        return linear(states.to(self.dtype), weight, self._tables[2])


def _whole(table: Tensor | None) -> Tensor | None:
    whole: Any = table  # a DTensor where it is split, which not every build of torch has
    return whole.full_tensor().detach() if hasattr(whole, "full_tensor") else table
