"""Drafting by a smaller causal language model with the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specengine import registry
from specengine.drafters import NO_HINTS, About, Hints, Maker, RowDraft
from specengine.errors import (
    InputError,
    TokenizerMismatchError,
    UnsupportedModelError,
    did_you_mean,
)
from specengine.models import Target, common_prefix
from specengine.models.huggingface import CausalLM
from specengine.models.kv_cache import LanguageModel, Rows
from specengine.models.native import NativeLM
from specengine.ops import PassRows
from specengine.options import LoadOptions


class SmallModel(RowDraft):
    """Any causal LM as the draft, given by its id or path, or loaded.

    Tokens that were committed are run with the next root, whether or not they have been drafted from: that costs rows
    of a pass that is made anyway.

    vocab_size: the target's; logits of padding rows beyond the smaller of both vocabularies are cut off.
    captured: UnsupportedModelError where its passes cannot be captured; merge: see CausalLM.
    """

    about = About(lookup=True, takes_any_model=True)

    def __init__(
        self,
        model: PreTrainedModel | NativeLM,
        vocab_size: int | None = None,
        *,
        pack: bool | None = None,
        captured: bool = False,
        merge: bool = False,
    ) -> None:
        native = isinstance(model, NativeLM)
        self.lm: LanguageModel = model if native else CausalLM(model, pack=pack, merge=merge)
        if captured and isinstance(self.lm, CausalLM):
            self.lm.require_capture()
        self.name = f"small_model ({model.name if native else model.config._name_or_path or type(model).__name__})"
        self.vocab_size = min(self.lm.vocab_size, vocab_size or self.lm.vocab_size)
        self._version = self.lm.version
        super().__init__(self.lm.new_cache(1))

    def __copy__(self) -> SmallModel:
        draft = object.__new__(type(self))
        draft.__dict__.update(self.__dict__)
        RowDraft.__init__(draft, self.lm.new_cache(1))
        return draft

    @classmethod
    def maker(cls, draft: Any, options: LoadOptions, checkpoints: Any) -> Maker | None:
        embedded = checkpoints.embedded
        if not isinstance(draft, str | PreTrainedModel):
            return None
        if options.draft_options:
            raise InputError(
                f"draft_options: accepted for EAGLE heads alone; draft {draft!r} is a small model"
            )
        if isinstance(draft, str) and draft != embedded.NAME:
            missing = checkpoints.checks.why_absent(draft, offline=options.offline)
            if missing is not None:
                embedded_names = _names(embedded.HEAD)
                meant = did_you_mean(draft, embedded_names)
                raise InputError(
                    f"draft: got {draft!r}, accepted {', '.join(embedded_names)}, a path or a Hub id; {missing}{meant}"
                )
        return lambda target, tokenizer: cls.from_model(
            draft, target, tokenizer, options, checkpoints
        )

    @classmethod
    def from_model(
        cls,
        draft: str | PreTrainedModel,
        target: Target,
        tokenizer: Any,
        options: LoadOptions,
        checkpoints: Any,
    ) -> SmallModel:
        """Load a model on the target's device. Raises InputError or TokenizerMismatchError if it does not fit."""
        loaded = dataclasses.replace(
            options,
            device=target.device,
            quantize=None,
            numerics="auto",
            backend=options.backend
            if options.backend == "huggingface"
            else None,  # native where it can
        )
        model, own_tokenizer, _, is_own = checkpoints.pretrained.load_model(draft, loaded)
        if torch.device(model.device) != target.device:
            raise InputError(
                f"draft: the model is on {model.device}, accepted {target.device}, the target's device"
            )
        if tokenizer is not None and own_tokenizer is not None:
            try:
                check_tokenizers(own_tokenizer, tokenizer)
            except TokenizerMismatchError as error:
                embedded = checkpoints.embedded
                if draft != embedded.NAME:
                    raise
                head = f"this is the whole model of that name; the head that ships is draft={embedded.HEAD!r}"
                raise TokenizerMismatchError(f"{error}; {head}") from None
        elif (
            vocabulary := model.vocab_size
            if isinstance(model, NativeLM)
            else model.get_input_embeddings().weight.shape[0]
        ) != target.vocab_size:
            raise InputError(
                f"draft: the vocabulary has {vocabulary} entries, the target's {target.vocab_size}; "
                "both must be equal without two tokenizers to compare"
            )
        try:
            return cls(
                model, target.vocab_size, pack=options.pack, captured=target.captured, merge=is_own
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"draft: {error}") from error

    @property
    def model_seconds(self) -> float:  # type: ignore[override]
        return self.lm.seconds

    @property
    def weights(self) -> tuple[torch.nn.Module, ...]:
        return (self.lm.model,)

    def begin(
        self, prompt: list[int], features: Tensor | None = None, hints: Hints = NO_HINTS
    ) -> None:
        self.lm.refresh()
        if self.lm.version != self._version:
            self.reset()
            self._version = self.lm.version
        self.cache.crop(min(common_prefix(self._tokens, prompt), self.cache.length))
        self._tokens = list(prompt)
        self.taken.fill_(1)  # the root
        self._put_off(prompt[self.cache.length :], [], hints)

    def _extend(self, tokens: list[int], features: list[Tensor]) -> None:
        self.lm.extend(
            self.cache, [min(token, self.lm.vocab_size - 1) for token in tokens], logits="none"
        )

    def _run(self, rows: Rows, pass_rows: PassRows, shared: Any = None) -> tuple[Tensor, None]:
        # A target with a larger, padded vocabulary may commit an id that is unknown here; any other will do for it.
        rows.tokens = rows.tokens.clamp(max=self.lm.vocab_size - 1)
        logits, _ = self.lm.forward(rows, self.cache, one=pass_rows.one)
        return logits[:, : self.vocab_size], None


def _names(head: str) -> list[str]:
    """Return the drafts that go by a name of their own, plug-ins included."""
    package = "specengine.drafters"
    named = (
        name for name in registry.names(package) if name not in ("eagle", "lookup", "small_model")
    )
    return [*named, *sorted(registry.plugins(package)), "none", head]


def check_tokenizers(draft: Any, target: Any) -> None:
    """Raise TokenizerMismatchError unless both tokenizers give every token the same id.

    Compared by content, so models whose vocabularies are padded to different sizes fit.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    differing = sorted(
        (t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t)), key=str
    )
    examples = ", ".join(
        f"{t!r}: target {ours.get(t)}, draft {theirs.get(t)}" for t in differing[:3]
    )
    raise TokenizerMismatchError(
        f"draft: its tokenizer differs from the target's in {len(differing)} of {len(ours)} tokens ({examples}); "
        "a draft model must use the target's tokenizer"
    )
