"""Models that run no tree in one forward: decoded on their own cache, as transformers' `generate` does.

The cache is what transformers gives the model: recurrent and convolution states, indexers, none at all. Where it can be
copied, a tree is verified by a copy with a row per path, and the accepted path is run once more on the original, unless
the copy holds it and nothing else, or can be cropped to it.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer

from specengine.errors import SpecEngineError
from specengine.models.configs import NO_MEMORY
from specengine.models.huggingface import (
    CausalLM,
    HuggingFaceTarget,
    LongRopeTarget,
    switches,
)
from specengine.models.kv_cache import CacheLayout, Logits, counted
from specengine.models.refusals import (
    NoTreesError,
    errors_named,
    mixing,
    model_name,
    refuse_others,
)
from specengine.ops.tree import TokenTree, path_of

CACHES = {  # the argument that takes each cache which a model returns
    "past_key_values": "past_key_values",
    "cache_params": "cache_params",
    "state": "state",
    "mems": "past_key_values",
    "past_buckets_states": "past_key_values",
}
_CROPPED = (DynamicLayer, DynamicIndexedLayer)
# Fields of configs whose models choose a token's keys among those of all tokens in its batch.
_UNSURE = dict.fromkeys(
    ("index_topk", "keep_window_size"), "what a token sees depends on the tokens that run with it"
)


@dataclass(eq=False)
class OwnCache:
    """A model's own cache of one sequence.

    tokens  those that it has taken in
    held    caches by the name that the model's forward has for them
    """

    tokens: list[int] = field(default_factory=list)
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def croppable(self) -> bool:
        """Return whether its last tokens can be taken back."""
        caches = list(self.held.values())
        return bool(caches) and all(
            type(cache) is DynamicCache and all(type(layer) in _CROPPED for layer in cache.layers)
            for cache in caches
        )

    def reach(self, length: int) -> int:
        """Return how many tokens `crop(length)` leaves."""
        return length if length == self.length or self.croppable else 0

    def crop(self, length: int) -> None:
        """Forget everything from token `length` on, or everything where the cache cannot be cropped."""
        if length < self.length and (not length or not self.croppable):
            self.tokens, self.held = [], {}
        elif length < self.length:
            for cache in self.held.values():
                cache.crop(length - self.length)
            self.tokens = self.tokens[:length]

    def reserve(self, capacity: int) -> None:
        """Do nothing: the model's cache grows as it is filled."""

    def copies(self, count: int, device: torch.device) -> dict[str, Any]:
        """Return the caches `count` times side by side."""
        caches = copy.deepcopy(self.held)
        if count > 1:
            for cache in caches.values():
                cache.reorder_cache(torch.zeros(count, dtype=torch.int64, device=device))
        return caches


class Ran(NamedTuple):
    """Results of a forward.

    logits  [rows, tokens, vocabulary], of all tokens or of the last one
    states  the features, [rows, tokens, features * hidden size]; None if there are none
    held    the caches after it, by the name that the model's forward has for them
    """

    logits: Tensor
    states: Tensor | None
    held: dict[str, Any]


class OwnCacheLM(CausalLM):
    """A model on its own cache, whatever that is.

    fault: why it verifies no trees by paths, as a few tokens show at construction; None where it does
    mixes: how a row depends on those that are run with it; empty where none does
    """

    attention = "its own"
    fuses = False  # its forward is the model's own
    _refuse = staticmethod(refuse_others)

    def _choose_attention(self) -> None:
        self._layout = CacheLayout((), self.dtype)  # its own cache has none that is known
        self.fault: str | None = "untried"
        with (
            errors_named(f"{model_name(self.model)}: its forward fails on a few tokens"),
            torch.inference_mode(),  # as answers run
        ):
            self.extend(self.new_cache(1), [token % self.vocab_size for token in (1, 2)])
        self.mixes = mixing(self._twin.modules)
        self.fault = (
            self.mixes
            or next(
                (reason for field, reason in _UNSURE.items() if getattr(self.config, field, None)),
                None,
            )
            or self._paths_fault()
        )

    def new_cache(self, capacity: int) -> Any:
        return OwnCache()

    def extend(  # type: ignore[override]
        self,
        cache: OwnCache,
        tokens: list[int],
        features: tuple[int, ...] = (),
        *,
        logits: Logits = "last",
    ) -> tuple[Tensor | None, Tensor | None]:
        if not tokens:
            return None, None
        alone = cache.length and self.fault is not None  # its modules may take one token at a time
        pieces = [[token] for token in tokens] if alone else [tokens]
        with counted(self):
            ran = [self._run(cache, piece, features, every=logits == "all") for piece in pieces]
        states = [states for _, states in ran if states is not None]
        rated = [rows for rows, _ in (ran if logits == "all" else ran[-1:])]
        return (
            None if logits == "none" else torch.cat(rated),
            torch.cat(states) if states else None,
        )

    def _run(
        self, cache: OwnCache, tokens: list[int], features: tuple[int, ...] = (), *, every: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run tokens. Return their logits, or those of the last one, and features of all."""
        token_rows = torch.tensor([[*cache.tokens, *tokens]], dtype=torch.int64, device=self.device)
        if not cache.length:
            # as `generate` makes it: the model may make its own
            modules = self._twin.modules
            mamba = "mamba" in type(modules).__name__.lower()
            cache.held = (
                {"cache_params" if mamba else "past_key_values": DynamicCache(config=self.config)}
                if modules._supports_default_dynamic_cache()  # noqa: SLF001
                else {}
            )
        out = self._forward(
            token_rows, len(tokens), cache.held, features, first=not cache.length, every=every
        )
        cache.held, cache.tokens = out.held, [*cache.tokens, *tokens]
        return out.logits[0], None if out.states is None else out.states[0]

    def _forward(
        self,
        token_rows: Tensor,
        count: int,
        past_caches: dict[str, Any],
        features: tuple[int, ...] = (),
        *,
        first: bool = False,
        every: bool = True,
    ) -> Ran:
        """Run the last `count` of `token_rows`, int64 [rows, tokens]; without `every`, logits are the last one's."""
        arguments: dict[str, Any] = {**past_caches, "use_cache": True}
        mask = {"attention_mask": torch.ones_like(token_rows)}
        twin = self._twin
        if "position_ids" in twin.accepts:
            arguments["position_ids"] = twin.modules._prepare_position_ids_for_generation(  # noqa: SLF001
                token_rows, arguments | mask
            )
        if "attention_mask" in twin.accepts:
            arguments |= mask
        if twin.keeps_rows and not every:
            arguments["logits_to_keep"] = 1
        prepared = twin.runs.prepare_inputs_for_generation(
            token_rows,
            next_sequence_length=count if past_caches else None,
            is_first_iteration=first,
            **arguments,
        )
        if every and "logits_to_keep" in prepared:
            prepared["logits_to_keep"] = 0  # all; some models' configs ask for the last
        if features:
            prepared["output_hidden_states"] = True
        out = twin.runs(**prepared, return_dict=True)
        return Ran(
            out.logits[:, -count if every else -1 :],
            torch.cat([out.hidden_states[i][:, -count:] for i in features], dim=-1)
            if features
            else None,
            {argument: out[name] for name, argument in CACHES.items() if out.get(name) is not None},
        )

    def verify(
        self, cache: OwnCache, tree: TokenTree, features: tuple[int, ...] = ()
    ) -> "tuple[Tensor, Tensor | None, TreePaths]":
        """Run a tree's nodes after the cached tokens.

        Returns logits, [nodes, vocabulary], features, [nodes, features * hidden size], and how the nodes were run.
        """
        paths = TreePaths(tree)
        rows = [[*cache.tokens, *row] for row in paths.tokens(tree)]
        with counted(self):
            out = self._forward(
                torch.tensor(rows, dtype=torch.int64, device=self.device),
                paths.longest,
                cache.copies(len(rows), self.device),
                features,
            )
        paths.held = out.held
        states = None if out.states is None else out.states[paths.row, paths.depth]
        return out.logits[paths.row, paths.depth], states, paths

    def keep(self, cache: OwnCache, paths: "TreePaths", path: list[int], tokens: list[int]) -> None:
        """Take in the accepted path of the tree verified last."""
        row = next(n for n, nodes in enumerate(paths.nodes) if nodes[: len(path)] == path)
        accepted = OwnCache(
            [*cache.tokens, *tokens, *[0] * (paths.longest - len(path))], paths.held
        )
        if len(path) < paths.longest and not accepted.croppable:
            self.extend(cache, tokens, logits="none")
            return
        if len(paths.nodes) > 1:
            for layer_cache in accepted.held.values():
                layer_cache.reorder_cache(
                    torch.tensor([row], dtype=torch.int64, device=self.device)
                )
        accepted.crop(cache.length + len(path))
        cache.tokens, cache.held = accepted.tokens, accepted.held

    @torch.inference_mode()
    def _paths_fault(self) -> str | None:
        """Verify a tree after a few tokens; return what went wrong, or None."""
        ids = [token % self.vocab_size for token in (1, 2, 3, 5, 7, 4)]
        try:
            cache, plain = self.new_cache(1), self.new_cache(1)
            for each in (cache, plain):
                self.extend(each, ids[:4])
            if not cache.held or not all(
                type(each) is DynamicCache
                # a model's file may have layers of another kind
                and {type(layer).__module__ for layer in each.layers} <= {DynamicCache.__module__}
                for each in cache.held.values()
            ):
                return "it has no cache of a kind that is known to be copied whole"
            logits, _, paths = self.verify(
                cache,
                TokenTree.of_lists([ids[4], ids[5], ids[0], ids[2]], [-1, 0, 0, 1], self.device),
            )
            expected = torch.cat(
                [self._run(plain, [token], every=True)[0] for token in (ids[4], ids[5], ids[2])]
            )
            if not self.is_close(logits[[0, 1, 3]], expected):
                return "several tokens at once give other logits than one after the other"
            self.keep(cache, paths, [0, 1], [ids[4], ids[5]])
            after, _ = self.extend(cache, [ids[2]])
            if after is None or not self.is_close(after, expected[-1:]):
                return "its cache is another one behind an accepted path"
        except (SpecEngineError, *NO_MEMORY):
            raise
        except Exception as error:  # caches of any kind may raise anything
            return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        return None


class TreePaths:
    """A tree as its root-to-leaf paths, each a row of one length: shorter ones are padded at their end.

    nodes: of each path; row, depth: int64 [nodes of the tree], where each node stands; held: caches after them.
    """

    def __init__(self, tree: TokenTree) -> None:
        parents = tree.parents.tolist()
        self.nodes = [
            path_of(parents, leaf) for leaf in sorted({*range(len(parents))}.difference(parents))
        ]
        self.longest = max(map(len, self.nodes))
        self.held: dict[str, Any] = {}
        places = {
            node: (row, depth)
            for row, path in enumerate(self.nodes)
            for depth, node in enumerate(path)
        }
        self.row, self.depth = (
            [places[node][part] for node in range(len(parents))] for part in (0, 1)
        )

    def tokens(self, tree: TokenTree) -> list[list[int]]:
        """Return the tokens of each row."""
        ids = tree.tokens.tolist()
        return [
            [ids[node] for node in path] + [ids[0]] * (self.longest - len(path))
            for path in self.nodes
        ]


class OwnCacheTarget(HuggingFaceTarget):
    """A model that runs no tree in one forward, for the reason in `cause`, on its own cache.

    trees: whether it takes drafts at all; without, it decodes plainly.
    """

    makes = OwnCacheLM
    paths = True
    lm: OwnCacheLM

    def __init__(
        self,
        model: PreTrainedModel,
        cause: str,
        *,
        pack: bool | None = None,
        merge: bool = False,
        reason: str = "",
    ) -> None:
        super().__init__(model, pack=pack, merge=merge, reason=reason)
        self.cause = cause
        self._paths: TreePaths | None = None
        # of the prompt, run with the first token to verify, as `generate` does
        self._waiting: list[int] = []

    @property
    def trees(self) -> bool:
        return self.lm.fault is None

    @property
    def notes(self) -> list[str]:
        how = "trees are verified path by path on" if self.trees else "decoded plainly on"
        why = (
            self.cause
            if self.trees or str(self.lm.fault) in self.cause
            else f"{self.cause}; and {self.lm.fault}"
        )
        return [f"{how} its own cache: {why}"]

    def cached(self, tokens: list[int]) -> int:
        # a prompt in two parts would be answered otherwise
        return 0 if self.lm.mixes else super().cached(tokens)

    def prefill(self, tokens: list[int], keep: int | None = None) -> Tensor | None:
        self.cache.crop(self.cached(tokens) if keep is None else keep)
        self.tokens, self._waiting = tokens[: self.cache.length], tokens[self.cache.length :]
        if not self._features:
            return None
        waiting, self._waiting, self.tokens = self._waiting, [], list(tokens)
        return self.lm.extend(self.cache, waiting, self._features, logits="none")[1]  # type: ignore[arg-type]

    def rate(self, tokens: list[int]) -> Tensor:
        self._waiting = []
        return super().rate(tokens)

    def reset(self) -> None:
        self._waiting = []
        super().reset()

    def verify(self, tree: TokenTree) -> tuple[Tensor, Tensor | None]:
        tree, cache, waiting = tree.trimmed(), self.cache, self._waiting
        self.tokens, self._waiting = [*self.tokens, *waiting], []
        if len(tree) == 1:
            self._paths = None
            logits, states = self.lm.extend(
                cache,  # type: ignore[arg-type]
                [*waiting, *tree.tokens.tolist()],
                self._features,
            )
            assert logits is not None
            return logits, None if states is None else states[-1:]
        self.lm.extend(cache, waiting, logits="none")  # type: ignore[arg-type]
        logits, states, self._paths = self.lm.verify(cache, tree, self._features)  # type: ignore[arg-type]
        return logits, states

    def commit(self, tree: TokenTree, path: list[int]) -> None:
        tokens = tree.tokens[path].tolist()
        if self._paths is not None:
            self.lm.keep(self.cache, self._paths, path, tokens)  # type: ignore[arg-type]
            self._paths = None
        self.tokens.extend(tokens)


def target_of(
    model: PreTrainedModel,
    *,
    pack: bool | None,
    strict: bool,
    captured: bool,
    merge: bool,
    reason: str,
) -> HuggingFaceTarget:
    """Return the target for a loaded model: one that runs trees, or one on the model's own cache (no graphs)."""
    kind = (
        LongRopeTarget
        if switches(model.config.get_text_config(decoder=True)) and not captured
        else HuggingFaceTarget
    )
    try:
        return kind(model, pack=pack, strict=strict, captured=captured, merge=merge, reason=reason)
    except NoTreesError as error:
        if captured:
            raise
        return OwnCacheTarget(model, str(error), pack=pack, merge=merge, reason=reason)
