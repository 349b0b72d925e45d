"""Drafting by an EAGLE head, which reads the target's hidden states."""

import contextlib
import copy
import time
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine import registry
from specengine.drafters import NO_HINTS, About, Hints, Maker, RowDraft, Traits, find
from specengine.errors import (
    InputError,
    UnsupportedModelError,
    require_input,
    require_supported,
)
from specengine.models import common_prefix
from specengine.models.dflash import DflashConfig
from specengine.models.eagle import (
    DraftHead,
    EagleHead,
    EagleRunner,
    HeadRows,
    TorchHead,
    head_from,
    with_appended_tokens,
)
from specengine.models.kv_cache import LanguageModel, Rows
from specengine.models.native import NativeHead, NativeLM
from specengine.ops import Nodes, PassRows
from specengine.options import LoadOptions


class EagleDraft(RowDraft):
    """An EAGLE-1, -2 or -3 head, given by its folder or Hub id: one decoder layer over the target's hidden states.

    Row i of the draft's cache pairs the target's hidden state at position i with token i + 1, at position i. With
    tokens 0 to t committed and the root at t + 1, the rows 0 to t are stable: the last row's output gives the
    root's children. A tree node at depth d is run from its parent's output and its own token at position t + d.

    States stand in one buffer: by node those that children are run from, and a spare one for padding. The root pass
    reads the target's features of the tokens that were accepted last, so cycles without a pass do without.

    head: as `models.eagle.head_from` makes it, or one that runs itself; target: the model that the hidden states come
    from. Raises InputError if head and target do not fit.
    """

    about = About(lookup=True)
    runner = TorchHead  # of a head that does not run itself; native: of a NativeLM's
    native: Any = NativeHead
    learnt: Any = None  # a checkpoints.learnt.Learnt, where it learns from use
    _stamp = 0  # of the head in use
    _pack: bool | None = None

    def __init__(
        self,
        head: EagleHead | DraftHead,
        target: LanguageModel,
        *,
        name: str = "",
        pack: bool | None = None,
    ) -> None:
        head = self.runner(head, target, pack) if isinstance(head, EagleHead) else head
        self.head: DraftHead = head
        self.token_ids = head.target_ids
        self.name = (
            f"eagle ({head.config.kind}{', ' + name if name else ''})"
            if isinstance(head, EagleRunner)
            else name
        )
        self.target, self.model_seconds, self.shares = target, 0.0, head.shares
        self._states = torch.zeros(0, head.hidden_size, dtype=head.dtype, device=target.device)
        self._temperatures = torch.tensor(
            head.temperatures, device=target.device, dtype=torch.float32
        )
        self._factors = 1 / self._temperatures if head.temperatures else None
        inverses = [1 / temperature for temperature in head.temperatures]
        sharpness = sum(inverses) / len(inverses) if inverses else 1.0
        self._traits = Traits(head.feature_ids, sharpness=sharpness)
        self._features = torch.zeros(0, head.feature_size, dtype=head.dtype, device=target.device)
        super().__init__(self.head.cache)

    def __copy__(self) -> "EagleDraft":
        draft = object.__new__(type(self))
        draft.__dict__.update(self.__dict__)
        draft.head = copy.copy(self.head)
        draft._states, draft._features = self._states.clone(), self._features[:0].clone()
        draft._factors = None if self._factors is None else self._factors.clone()
        RowDraft.__init__(draft, draft.head.cache)
        return draft

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions, checkpoints: Any) -> Maker | None:
        embedded, heads = checkpoints.embedded, checkpoints.eagle
        if not isinstance(draft, str) or draft == embedded.NAME or cls is not EagleDraft:
            return None
        ships = draft in embedded.HEADS
        folder = (
            embedded.shipped_head(draft)
            if ships
            else heads.head_folder(draft, offline=options.offline)
        )
        if folder is None and ships:
            raise InputError(f"draft: {embedded.why_missing(draft)}")
        if folder is None:
            return None
        name = next(
            (name for name in embedded.HEADS if embedded.shipped_head(name) == folder), folder.name
        )
        read = vars(registry.build(heads.HeadOptions, options.draft_options, "draft_options"))

        def make(target: Any, _: Any) -> EagleDraft:
            base = heads.load_head(folder, **read)
            kind = cast(Any, find("dflash")) if isinstance(base.config, DflashConfig) else cls
            require_supported(
                f"draft: a {base.config.kind} head is run without graphs; add graphs=False",
                kind is cls or not target.captured,
            )
            draft: EagleDraft = kind.of(base, target.lm, name, pack=options.pack)
            if options.learn is not None and kind is cls:
                draft.learnt = checkpoints.learnt.Learnt(
                    options.learn, target.lm, target.name, base
                )
                draft._pack = options.pack
                draft.renew()
            return draft

        return make

    @classmethod
    def of(
        cls, found: Any, target: LanguageModel, name: str, *, pack: bool | None = None
    ) -> "EagleDraft":
        """Make the draft of a head that was read, in the target's dtype and on its device, in C++ if possible.

        found: as checkpoints.eagle.load_head returns it.
        """
        config, state = with_appended_tokens(found.config, found.state, target)
        if isinstance(target, NativeLM) and pack is None:
            with contextlib.suppress(UnsupportedModelError):  # torch runs heads of all kinds
                return cls(cls.native(config, state, target), target, name=name)
        return cls(
            head_from(config, state, target.dtype, target.device), target, name=name, pack=pack
        )

    def renew(self) -> bool:
        """Take the head that was learnt since, with an empty cache. Return whether there was one."""
        if (stamp := self.learnt.stamp) == self._stamp:
            return False
        if self.learnt.made[0] != stamp:  # drafts of texts at once share its weights
            self.learnt.made = (
                stamp,
                self.of(self.learnt.head(), self.target, self.name, pack=self._pack),
            )
        self.__dict__.update(
            copy.copy(self.learnt.made[1]).__dict__
            | {
                "name": self.name,
                "learnt": self.learnt,
                "_stamp": stamp,
                "_pack": self._pack,
            }
        )
        return True

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def weights(self) -> tuple[torch.nn.Module, ...]:
        return self.head.weights

    @property
    def state(self) -> tuple[Tensor, ...]:
        return *super().state, self._features

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return *super().reads, self._states, self._features, *self.head.reads

    def reserve(self, tokens: int, nodes: int, longest: int) -> None:
        super().reserve(tokens, nodes, longest)
        if len(self._states) < len(self._seen):
            self._states = self._states.new_zeros(len(self._seen), self._states.shape[1])
        if (missing := len(self.pending) - len(self._features)) > 0:
            self._features = pad(self._features, (0, 0, 0, missing))
        self.head.refresh()

    def cached(self, tokens: list[int]) -> int:
        agreed, stable = common_prefix(self._tokens, tokens), self.cache.length
        # A token that waits needs itself alone, a stable row was run with the token after it as well.
        return agreed if agreed > stable else max(agreed - 1, 0)

    @torch.inference_mode()
    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        if (
            self._factors is not None
        ):  # the head's own temperatures suit a greedy target; a drawn token is less sure
            self._factors.copy_(1 / self._temperatures.clamp(min=hints.temperature))
        self.head.refresh()
        self.head.multiple = hints.multiple
        before_features = len(prompt) - (0 if features is None else features.shape[0])
        require_input(
            f"features: missing for tokens {self.cached(prompt)} to {before_features} of {len(prompt)}",
            before_features <= self.cached(prompt),
        )
        waiting = max(before_features - self.cache.length, 0)
        unread = torch.cat([rows[:waiting] for rows in (*self._unread, self._features)])[:waiting]
        if features is not None:
            unread = torch.cat([unread, features.to(unread.dtype)])
        self.cache.crop(min(self.cache.length, before_features))
        self._tokens = list(prompt)
        last = unread[-1:]  # waits for the root
        self.taken.fill_(len(last))
        self._features[: len(last)] = last
        self._put_off(prompt[self.cache.length + 1 :], [unread[:-1]], hints)

    @torch.inference_mode()
    def _extend(self, tokens: list[int], features: list[Tensor]) -> None:
        began = time.perf_counter()
        accepted = len(tokens) - sum(map(len, features))
        self.head.extend(torch.cat([*features, self._features[:accepted]]), tokens)
        self._features[0] = self._features[accepted]
        self.model_seconds += time.perf_counter() - began

    @torch.inference_mode()
    def take(self, tokens: Tensor, path: Nodes, features: Tensor | None) -> None:
        if features is None:
            raise InputError("features: an EAGLE draft needs a target that gives its hidden states")
        super().take(tokens, path, features)

    def _shared(self, rows: Rows, pass_rows: PassRows) -> HeadRows:
        count, first = rows.tokens.shape[0], pass_rows.one is not None
        return HeadRows(
            cast(Any, self.head),
            rows,
            self._states,
            pass_rows.sources,
            self._features[:count] if first else None,
            1 if first else count,
            pass_rows.one,
        )

    def _run(
        self, rows: Rows, pass_rows: PassRows, shared: HeadRows | None = None
    ) -> tuple[Tensor, Tensor]:
        if not torch.is_inference_mode_enabled():  # to ask costs less than to enter it again
            with torch.inference_mode():
                return self._run(rows, pass_rows, shared)
        began = time.perf_counter()
        if shared is None:
            unread = None if pass_rows.one is None else self._features[: rows.tokens.shape[0]]
            logits, states = self.head.forward(
                self._states, pass_rows.sources, rows, pass_rows.one, unread
            )
        else:
            logits, states = shared.logits, shared.out
            self.model_seconds += shared.seconds
        self._states.index_copy_(0, pass_rows.targets, states[: len(pass_rows.targets)])
        if pass_rows.factors is not None:
            logits = (
                logits.mul_(pass_rows.factors)
                if logits.dtype is torch.float32
                else logits * pass_rows.factors
            )
        self.model_seconds += time.perf_counter() - began
        return logits, states
