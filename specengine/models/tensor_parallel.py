"""Tensor parallel: one process a rank, as torchrun starts them, and weights split by the model's own plan."""

import atexit
import functools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, distributed as dist
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specengine import ops
from specengine.errors import (
    RankError,
    UnsupportedModelError,
    require_input,
    require_supported,
    restating,
)
from specengine.models.huggingface import CausalLM, HuggingFaceTarget
from specengine.models.recurrent import sizes_of
from specengine.ops.tree import TokenTree

# between two commands; a rank that dies closes its connections at once
FOREVER = timedelta(days=365)
WHOLE = "replicate"  # transformers' name of not splitting


class Ranks(NamedTuple):
    """The processes of a run. control: the group that commands go through, on the host."""

    own: int
    size: int
    control: Any


def launched() -> bool:
    """Return whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def require_launched() -> None:
    """Raise InputError if this process has no other ranks."""
    require_input(
        "tp_plan: this is the only process; start it by torchrun --nproc-per-node N, which sets WORLD_SIZE and RANK",
        launched(),
    )
    require_input(
        "tp_plan: these ranks serve an engine already; accepted one engine per run of torchrun",
        not (dist.is_available() and dist.is_initialized() and ranks.cache_info().currsize),
    )


def splitting(config: PretrainedConfig, trust_remote_code: bool = False) -> Any:
    """Return the `distributed_config` of `from_pretrained` for this model over the present ranks.

    Attention stays whole on each rank where its heads cannot be dealt out evenly. UnsupportedModelError where the model
    has no plan.
    """
    with restating(
        ImportError,
        lambda _: UnsupportedModelError("tp_plan: it needs transformers 5.18 or newer"),
    ):
        from transformers.distributed import DistributedConfig
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    plan: dict[str, str] = getattr(shape, "_tp_plan", None) or {}
    require_supported(
        f"tp_plan: {type(shape).__name__} has no tensor-parallel plan in transformers", bool(plan)
    )
    require_supported(
        f"tp_plan: {type(shape).__name__} has recurrent layers, which are not split",
        sizes_of(shape) is None,
    )
    count = int(os.environ["WORLD_SIZE"])
    text = config.get_text_config(decoder=True)
    heads = (
        text.num_attention_heads,
        getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
    )
    whole = (
        {name: WHOLE for name in plan if ".self_attn" in name}
        if any(one % count for one in heads)
        else {}
    )
    units = getattr(text, "intermediate_size", None)
    require_supported(
        f"tp_plan: {units} units of a layer's MLP cannot be divided among {count} ranks",
        not units or not units % count,
    )
    return DistributedConfig(tp_size=count, tp_plan=whole or "auto")


@functools.cache
def ranks() -> Ranks:
    """Return the ranks of this run, once the model is split over them."""
    return Ranks(
        dist.get_rank(),
        dist.get_world_size(),
        control=dist.new_group(backend="gloo", timeout=FOREVER),
    )


class ShardedLM(CausalLM):
    """A model that runs on all ranks together. Rank 0, which drafts, has its embeddings and its head whole as well."""

    fuses = False  # its modules are tied to their ranks

    def __init__(
        self, model: PreTrainedModel, *, pack: bool | None = None, merge: bool = False
    ) -> None:
        # each rank holds a part of the weights alone
        super().__init__(model, pack=False, merge=True)
        head = model.get_output_embeddings()
        tables = [model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
        whole = [_whole(table) for table in tables]  # by all ranks at once
        self._tables: list[Any] = [] if dist.get_rank() else whole

    def _own_twin(self) -> PreTrainedModel:
        return self.model.eval()  # whose modules transformers has tied to its ranks

    @property
    def table(self) -> Tensor:
        return cast(Tensor, self._tables[0])

    def _head_product(self, states: Tensor) -> Tensor:
        return linear(states, *self._tables[1:])


def _whole(table: Tensor | None) -> Tensor | None:
    whole: Any = table  # a DTensor where it is split, which not every build of torch has
    return whole.full_tensor().detach() if hasattr(whole, "full_tensor") else table


T = TypeVar("T")
END = "end"
ROLL_CALL = timedelta(seconds=10)


class ShardedTarget(HuggingFaceTarget):
    """The part of the target on one rank: shards of the weights, and a cache of its own heads' keys and values."""

    makes = ShardedLM

    def __init__(self, model: PreTrainedModel, *, strict: bool = False, reason: str = "") -> None:
        self.ranks = ranks()
        super().__init__(model, pack=False, strict=strict, reason=reason)

    @property
    def backend(self) -> str:  # type: ignore[override]
        return f"{super().backend}, {self.ranks.size} ranks"

    def run_tree(self, tokens: list[int], parents: list[int]) -> tuple[Tensor, Tensor | None]:
        """Verify a tree given as lists, as `verify` does."""
        return super().verify(TokenTree.of_lists(tokens, parents, self.device))

    def want(self, features: Sequence[int] = (), successors: int = 0) -> None:
        super().want(tuple(features), successors)

    def keep_path(self, path: list[int]) -> None:
        """Keep the slots of a path, as `commit` does, without the tokens."""
        self.cache.commit(path)


class Leader(ShardedTarget):
    """Rank 0: as any other target for the engine. RankError once a rank is gone."""

    def __init__(self, model: PreTrainedModel, *, strict: bool = False, reason: str = "") -> None:
        self._lost: str | None = None
        super().__init__(model, strict=strict, reason=reason)
        atexit.register(self._dismiss)

    def reserve(self, tokens: int, scratch: int) -> None:
        self._together("reserve", super().reserve, tokens, scratch)

    def want(self, features: Sequence[int] = (), successors: int = 0) -> None:
        features = tuple(features)
        if features != self._features:
            self._together("want", super().want, features, successors)
        else:
            super().want(features, successors)

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        return self._together(
            "prefill", super().prefill, tokens, self.cached(tokens) if keep is None else keep
        )

    def rate(self, tokens: list[int]) -> Tensor:
        return self._together("rate", super().rate, tokens)

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        verified = tree.trimmed() if ops.is_free(tree.size) else tree
        nodes = (column[: len(verified)].tolist() for column in (verified.tokens, verified.parents))
        return self._together("run_tree", self.run_tree, *nodes)

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        self._together("keep_path", self.keep_path, path)
        self.tokens.extend(tree.tokens[path].tolist())

    def reset(self) -> None:
        self._together("reset", super().reset)

    def _together(self, name: str, run: Callable[..., T], *arguments: Any) -> T:
        """Have all ranks do this."""
        if self._lost is not None:
            raise RankError(self._lost)
        try:
            _broadcast((name, arguments), self.ranks)
            return run(*arguments)
        except BaseException as error:
            # Another rank may wait inside this for ever: what was begun together cannot be left alone.
            self._lost = (
                _told(error, self.ranks) or f"the ranks stopped inside {name}; start them anew"
            )
            if isinstance(error, RuntimeError) and _is_connection(error):
                raise RankError(self._lost) from error
            raise

    def _dismiss(self) -> None:
        if self._lost is None:
            self._lost = "the ranks have been dismissed"
            try:
                _broadcast((END, ()), self.ranks)
            except RuntimeError:
                return
            dist.destroy_process_group()


def lead_or_follow(model: PreTrainedModel, *, strict: bool, reason: str) -> Leader:
    """Return the target on rank 0. Other ranks do not return: they follow rank 0 and exit when it does."""
    if ranks().own == 0:
        return Leader(model, strict=strict, reason=reason)
    sys.exit(follow(ShardedTarget(model, strict=strict, reason=reason)))


@torch.inference_mode()
def follow(target: ShardedTarget) -> int:
    """Do what rank 0 says until it ends; the exit status."""
    try:
        while (command := _broadcast(None, target.ranks))[0] != END:
            with target.running():
                getattr(target, command[0])(*command[1])
    except RuntimeError as error:
        if not _is_connection(error):
            raise
        print(
            f"specengine: error: rank {target.ranks.own} ends: {_told(error, target.ranks)}",
            file=sys.stderr,
            flush=True,
        )
        return 1
    dist.destroy_process_group()
    return 0


def _broadcast(command: Any, ranks: Ranks) -> Any:
    """Return rank 0's command. At the end, return once no thread of the group holds a tensor."""
    written = json.dumps(command).encode() if ranks.own == 0 else b""
    length = torch.tensor([len(written)], dtype=torch.int64, device="cpu")
    dist.broadcast(length, src=0, group=ranks.control)
    body = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    if written:
        body.numpy()[:] = np.frombuffer(written, np.uint8)
    dist.broadcast(body, src=0, group=ranks.control)
    received = json.loads(body.numpy().tobytes())
    if received[0] == END:
        # A thread of gloo may let go of a tensor after the wait for it has ended, and takes Python's lock for that:
        # should Python end first, the thread dies inside a destructor, which aborts the process.
        references = weakref.ref(length), weakref.ref(body)
        del length, body
        while any(tensor() is not None for tensor in references):
            time.sleep(0.001)
    return received


def _is_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("onnection", "gloo", "NCCL", "socket")
    )


def _told(error: BaseException, ranks: Ranks) -> str | None:
    """Name the ranks that are gone, which rank 0 finds by a roll call; None for an error of another kind."""
    if not (isinstance(error, RuntimeError) and _is_connection(error)):
        return None
    if ranks.size == 2 or ranks.own:
        return f"rank {1 - ranks.own if ranks.size == 2 else 'another'} of {ranks.size} is gone"
    try:
        dist.monitored_barrier(ranks.control, ROLL_CALL, wait_all_ranks=True)
    except RuntimeError as missing:
        return f"of {ranks.size} ranks one or more are gone: {str(missing).splitlines()[0]}"
    return f"the connection of {ranks.size} ranks broke: {str(error).splitlines()[0]}"
