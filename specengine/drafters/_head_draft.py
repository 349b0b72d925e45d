"""Drafting by an EAGLE head: what drafters/eagle.py and its variants share, no draft by itself."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from specengine import ops
from specengine.drafters import Drafter, Step, scratch_mask
from specengine.errors import InputError
from specengine.modeling import causal_lm
from specengine.modeling.attention import Visibility, causal_rows
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.eagle_head import EagleConfig, EagleHead, causal, embed_for, require_fit
from specengine.modeling.kv_cache import KVCache
from specengine.modeling.native import NativeLM
from specengine.modeling.packing import Packed, worth_packing
from specengine.records import Cycle
from specengine.targets import common_prefix
from specengine.tree import TokenTree

# On a CPU each node that is verified costs: the best of seven ways by bench.policies on self-written prompts.
CPU_POLICY: tuple[str, dict[str, Any]] = ("salf/cpu", {})


class HeadDraft(Drafter):
    """An EAGLE-1, -2 or -3 head: one decoder layer over the target's hidden states.

    Row i of the draft's cache pairs the target's hidden state at position i with token i + 1, at position i. With
    tokens 0 to t committed and the root at t + 1, the rows 0 to t are stable: the last row's output gives the
    root's children. A tree node at depth d is run from its parent's output and its own token at position t + d; its
    keys and values stand in a scratch slot behind the stable rows and are forgotten after drafting.

    head: as `modeling.eagle_head.head_from` makes it; target: the model that the hidden states come from.
    InputError where head and target do not fit.
    """

    lookup = True
    captures_when_named = True
    default_policy = ("eagle", {"width": 10, "expansions": 6, "budget": 60})

    def __init__(
        self, head: EagleHead, target: CausalLM | NativeLM, *, name: str = "", pack: bool | None = None
    ) -> None:
        self._begin_with(head.config, target, name, head.dtype)
        self.head = head
        self._packed: Packed | None = Packed(head) if (worth_packing(head) if pack is None else pack) else None
        self._runs = head
        self._target_ids: Tensor | None = head.target_ids()

    def _begin_with(self, config: EagleConfig, target: CausalLM | NativeLM, name: str, dtype: torch.dtype) -> None:
        """What does not depend on who runs the head. dtype: of its states and of the cache."""
        require_fit(config, target)
        self.name = f"eagle (EAGLE-{config.version}{', ' + name if name else ''})"
        self.features = config.feature_ids(target.layers)
        self.target = target
        self.cache = KVCache(1, config.num_kv_heads, config.head_dim, 1, dtype=dtype, device=target.device)
        if target.device.type == "cpu":
            self.default_policy = CPU_POLICY  # type: ignore[misc]
        self._seconds = 0.0
        # By node: the recurrent state of the root and of each node drafted from.
        self._states = torch.empty(0, config.hidden_size, dtype=dtype, device=target.device)
        self._slots = torch.empty(0, dtype=torch.int64, device=target.device)  # node in each scratch slot
        self._tokens: list[int] = []  # committed, the current root excluded
        self._pending = self._states  # fused features of the tokens behind the stable rows

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self._seconds

    def cached(self, tokens: list[int]) -> int:
        agreed, stable = common_prefix(self._tokens, tokens), self.cache.length
        # A pending row needs its own token alone, a stable one was run with the token after it as well.
        return agreed if agreed > stable else max(agreed - 1, 0)

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        if self._packed is not None:
            self._runs = self._packed.model()  # type: ignore[assignment]
        kept = len(prompt) - (0 if features is None else features.shape[0])
        if kept > self.cached(prompt):
            raise InputError(f"features: of {self.cached(prompt)} of {len(prompt)} tokens they are known, got {kept}")
        stable = min(self.cache.length, kept)
        self._pending = self._pending[: max(kept - self.cache.length, 0)]
        self.cache.crop(stable)
        self._tokens = list(prompt)
        if features is not None:
            self._add_pending(features)

    @torch.inference_mode()
    def step(self, tree: TokenTree, nodes: Tensor) -> Step:
        began = time.perf_counter()
        states = self._step_root(tree) if int(tree.passes) == 0 else self._step_nodes(tree, nodes)
        if states is None:  # a prompt of one token: the target has not run yet, so there is nothing to draft from
            return Step(torch.full((1, 1), float("-inf"), device=tree.device), normalized=True)
        logits = self._logits(states)
        if logits is None:
            logits = self.target.head(states)
        self._seconds += time.perf_counter() - began
        return Step(logits, self._target_ids, hidden=states)

    def observe(self, cycle: Cycle) -> None:
        if cycle.features is None:
            raise InputError("features: an EAGLE draft needs a target that gives its hidden states")
        path = torch.tensor(cycle.path, device=cycle.features.device)
        self._tokens += cycle.tree.tokens[path.to(cycle.tree.device)].tolist()
        self._add_pending(cycle.features[path])

    def reset(self) -> None:
        self.cache.crop(0)
        self._tokens = []
        self._pending, self._slots = self._pending[:0], self._slots[:0]

    @torch.inference_mode()
    def _add_pending(self, features: Tensor) -> None:
        began = time.perf_counter()
        self._pending = torch.cat([self._pending, self._fuse(features)])
        self._seconds += time.perf_counter() - began

    def _step_root(self, tree: TokenTree) -> Tensor | None:
        self._slots = self._slots[:0]
        pending, self._pending = self._pending, self._pending[:0]
        if not len(pending):
            return None
        device = pending.device
        tokens = torch.tensor(self._tokens[self.cache.length + 1 :], dtype=torch.int64, device=device)
        tokens = torch.cat([tokens, tree.tokens[:1].to(device)])
        self.cache.reserve(self.cache.length + len(pending) + tree.capacity)
        if len(self._states) < tree.capacity:
            self._states = self._states.new_empty(tree.capacity, self._states.shape[1])
        for piece, piece_tokens in zip(
            pending.split(causal_lm.PREFILL_ROWS), tokens.split(causal_lm.PREFILL_ROWS), strict=True
        ):
            rows, length = len(piece), self.cache.length
            positions = torch.arange(length, length + rows, device=device)
            states = self._run(piece, piece_tokens, positions, length, causal_rows(rows, length, device))
            self.cache.length += rows
        self._states[0] = states[-1]
        return states[-1:]

    def _step_nodes(self, tree: TokenTree, nodes: Tensor) -> Tensor:
        length, used = self.cache.length, self._slots.shape[0]
        self._slots = torch.cat([self._slots, nodes])
        states = self._run(
            self._states[tree.parents[nodes]],
            tree.tokens[nodes],
            tree.depths[nodes] + (length - 1),
            length + used,
            Visibility(scratch_mask(tree, nodes, self._slots, length), prefix=length),
        )
        self._states[nodes] = states
        return states

    def _run(self, hidden: Tensor, tokens: Tensor, positions: Tensor, start: int, visibility: Visibility) -> Tensor:
        """Recurrent states [rows, hidden size]; keys and values go to slots start to start + rows."""
        attend = _SlabAttention(self.cache, start, visibility)
        return self._runs(hidden[None], embed_for(self.head, self.target, tokens)[None], positions[None], attend)[0]

    def _fuse(self, features: Tensor) -> Tensor:
        return self._runs.fuse(features.to(self.head.dtype))

    def _logits(self, states: Tensor) -> Tensor | None:
        """[rows, draft vocabulary]; None where the target's head reads the states."""
        return self._runs.logits(states)


class _SlabAttention:
    """Attention of rows whose keys and values go to slots from `start` on, over all slots up to theirs."""

    def __init__(self, cache: KVCache, start: int, visibility: Visibility) -> None:
        self.slab, self.start, self.visibility = cache.slab[0], start, visibility

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.slab[:, :, : self.start + key.shape[2]]
        keys[:, self.start :] = key[0]
        values[:, self.start :] = value[0]
        if self.visibility.causal:
            return causal(query, key, value)
        mask = self.visibility.for_groups(query.shape[1] // key.shape[1], query.dtype)
        return ops.tree_attention(query[0], keys, values, mask, query.shape[-1] ** -0.5)[None]
