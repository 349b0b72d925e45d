"""Drafting by a causal language model: what drafters/small_model.py and its variant share, no draft by itself."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine.drafters import Drafter, Step, scratch_mask
from specengine.modeling.attention import Visibility
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.native import NativeLM
from specengine.records import Cycle
from specengine.targets import common_prefix
from specengine.tree import TokenTree


class ModelDraft(Drafter):
    """Any Hugging Face causal LM as the draft.

    Its cache holds the committed tokens and, in the scratch slots behind them, one slot per node drafted from; a
    node sees the committed tokens, its ancestors' slots and its own. Tokens that were committed without having
    been drafted from are run together with the next cycle's root.

    vocab_size: the target's; logits of padding rows beyond the smaller of both vocabularies are cut off.
    """

    lookup = True
    captures_when_named = True
    default_policy = ("eagle", {"width": 4, "expansions": 4, "budget": 16})

    def __init__(
        self, model: PreTrainedModel | NativeLM, vocab_size: int | None = None, *, pack: bool | None = None
    ) -> None:
        native = isinstance(model, NativeLM)
        self.lm: CausalLM | NativeLM = model if native else CausalLM(model, pack=pack)
        self.name = f"small_model ({model.name if native else model.config._name_or_path or type(model).__name__})"
        self.cache = self.lm.new_cache(1)
        self._tokens: list[int] = []  # committed, the current root excluded; the cache may lag behind
        self.vocab_size = min(self.lm.vocab_size, vocab_size or self.lm.vocab_size)
        self.reset()

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    def begin(self, prompt: list[int], features: Tensor | None = None) -> None:
        self.lm.refresh()
        kept = min(common_prefix(self._tokens, prompt), self.cache.length)
        self.cache.crop(kept)
        self._tokens = list(prompt)

    def step(self, tree: TokenTree, nodes: Tensor) -> Step:
        logits = self._step_root(tree) if int(tree.passes) == 0 else self._step_nodes(tree, nodes)
        return Step(logits[:, : self.vocab_size])

    def observe(self, cycle: Cycle) -> None:
        path = self._accepted_slots(cycle.tokens)
        self.cache.compact(path)
        self._tokens += [int(cycle.tree.tokens[0]), *cycle.tokens[:-1]]

    def reset(self) -> None:
        self.cache.crop(0)
        self._tokens = []
        self._tree = TokenTree.root(0)
        self._slots = torch.empty(0, dtype=torch.int64)  # node in each scratch slot

    def _step_root(self, tree: TokenTree) -> Tensor:
        pending = self._tokens[self.cache.length :]
        self._tree, self._slots = tree, torch.zeros(1, dtype=torch.int64, device=tree.device)
        self.cache.reserve(self.cache.length + len(pending) + 1 + tree.capacity)
        logits, _ = self.lm.extend(self.cache, self._known([*pending, int(tree.tokens[0])]))
        assert logits is not None
        self.cache.length -= 1  # the root is not committed yet: its slot is the first of the scratch
        return logits[None]

    def _known(self, tokens: list[int]) -> list[int]:
        # A target with a larger, padded vocabulary may commit an id that is unknown here; any other will do for it.
        return [min(token, self.lm.vocab_size - 1) for token in tokens]

    def _step_nodes(self, tree: TokenTree, nodes: Tensor) -> Tensor:
        length, used = self.cache.length, self._slots.shape[0]
        self._slots = torch.cat([self._slots, nodes])
        visibility = Visibility(scratch_mask(tree, nodes, self._slots, length), prefix=length)
        logits, _ = self.lm.forward(
            tree.tokens[nodes], tree.depths[nodes] + length, self.cache, length + used, visibility
        )
        return logits

    def _accepted_slots(self, tokens: list[int]) -> list[int]:
        """Scratch slots of the root and of the committed tokens that were drafted from."""
        nodes = self._slots.tolist()
        parents, node_tokens = self._tree.parents[self._slots].tolist(), self._tree.tokens[self._slots].tolist()
        slot_of = {(parent, token): slot for slot, (parent, token) in enumerate(zip(parents, node_tokens, strict=True))}
        path = [0]
        for token in tokens[:-1]:  # the last token is the next root
            slot = slot_of.get((nodes[path[-1]], token))
            if slot is None:
                break
            path.append(slot)
        return path
