"""Loading: from names, paths or loaded models to a target, a draft and a policy that fit together."""

import contextlib
import dataclasses
import errno
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

from specengine import drafters, policies
from specengine.checkpoints import checks, eagle, embedded, learnt, likeness, mtp, pretrained
from specengine.checkpoints.checks import model_in
from specengine.checkpoints.pretrained import LoadedModel, is_gguf, load_model, load_tokenizer
from specengine.drafters import Drafter, Maker, innermost
from specengine.drafters.eagle import EagleDraft
from specengine.drafters.lookup import Lookup
from specengine.drafters.recycling import Recycling
from specengine.drafters.small_model import SmallModel
from specengine.errors import (
    CheckpointError,
    InputError,
    UnsupportedModelError,
    require,
    require_input,
    shown,
)
from specengine.models.configs import fixed_context
from specengine.models.native import NativeLM, NativeTarget
from specengine.models.own_cache import OwnCacheTarget, target_of
from specengine.models.tensor_parallel import ShardedTarget, lead_or_follow, require_launched
from specengine.policies import TreePolicy

if TYPE_CHECKING:
    from specengine.models import Target
    from specengine.models.huggingface import HuggingFaceTarget
    from specengine.models.kv_cache import LanguageModel
    from specengine.options import LoadOptions

PLAIN, RECYCLING = ("plain", "none"), "recycling"
CHECKPOINTS = SimpleNamespace(
    checks=checks, eagle=eagle, embedded=embedded, learnt=learnt, mtp=mtp, pretrained=pretrained
)


@dataclass(frozen=True)
class Parts:
    """The parts of an engine.

    models  those of target and draft
    notes   lines for the user on how the parts fit
    """

    target: "HuggingFaceTarget | NativeTarget"
    drafter: Drafter | None
    policy: TreePolicy | None
    tokenizer: Any
    models: "tuple[LanguageModel, ...]"
    notes: list[str]


@dataclass(frozen=True)
class Recipe:
    """The names or models that an engine's parts are loaded from, to load them again if a model has changed."""

    model: str | PreTrainedModel | None
    draft: str | PreTrainedModel | Drafter | None
    policy: str | TreePolicy | None
    options: "LoadOptions"

    def load(self) -> Parts:
        return load(self.model, self.draft, self.policy, self.options)


@dataclass
class ModelWatch:
    """The models of an engine's target and draft, and the recipe to make both anew; None where they were brought along.

    Models that were loaded here by name are watched too, but look for no changes of theirs.
    """

    models: "tuple[LanguageModel, ...]"
    recipe: Recipe | None = None

    def follow(self, tokenizer: Any) -> Parts | None:
        """Return new parts where more than numbers was changed, or None.

        tokenizer: of the engine, which new parts keep. UnsupportedModelError where the model has become one that cannot
        be run, or there is no recipe that makes the parts again: a Drafter was made for the model as it was.
        """
        try:
            for model in self.models:
                model.require_same()
        except UnsupportedModelError:
            if self.recipe is None or isinstance(self.recipe.draft, Drafter):
                raise
            parts = dataclasses.replace(
                self.recipe, options=dataclasses.replace(self.recipe.options, tokenizer=tokenizer)
            ).load()
            self.models = parts.models
            return parts
        return None

    def refresh(self) -> None:
        """Have the models take in changed numbers."""
        for model in self.models:
            model.refresh()


@contextlib.contextmanager
def _as_if_alone() -> Iterator[None]:
    """Make tensors on the CPU and in the models' own dtypes within, whatever the caller set."""
    with (
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.inference_mode(False),
    ):
        yield


@_as_if_alone()
def load(
    model: str | PreTrainedModel | None,
    draft: str | PreTrainedModel | Drafter | None,
    policy: str | TreePolicy | None,
    options: "LoadOptions",
) -> Parts:
    """Return the parts for these names; cheap checks come before any weights are read."""
    model, draft = _checked("model", model), _checked("draft", draft)
    _check_names(draft, policy, options)
    require_input(
        "dtype, device: the model is loaded already; load it as wanted, or pass its name",
        isinstance(model, str | None) or (options.dtype == "auto" and options.device is None),
    )
    if options.tp_plan is not None:
        require_launched()
    require_input(
        "tp_plan: accepted with a model's name or its folder, which all ranks read",
        options.tp_plan is None
        or (isinstance(model, str | None) and (model is None or not is_gguf(model))),
    )
    drafts = policy != "plain" and not (isinstance(draft, str) and draft in PLAIN)
    if drafts:
        check_draft(draft, options)
    loaded = load_model(model, options, load_tokenizer(options))
    by_default = (
        options.tp_plan is None
        and not isinstance(loaded.model, NativeLM)
        and loaded.model.device.type == "cuda"
    )
    resolved = dataclasses.replace(
        options, graphs=by_default if options.graphs is None else options.graphs
    )
    try:
        target, drafter = _pair(loaded, draft, policy, drafts, resolved)
    except (InputError, UnsupportedModelError) as error:
        if options.graphs is not None or not resolved.graphs:
            raise
        resolved = dataclasses.replace(options, graphs=False)
        target, drafter = _pair(
            loaded._replace(reason=f"no graphs: {error}"), draft, policy, drafts, resolved
        )
    require_input(
        f"learn: draft {draft or 'none'!r} does not learn from use; accepted with an EAGLE head",
        options.learn is None or getattr(drafter, "learnt", None) is not None,
    )
    require_input(
        "learn: accepted without graphs, which read one head's weights; add graphs=False",
        options.learn is None or not resolved.graphs,
    )
    drafted = (drafter.lm,) if isinstance(drafter, SmallModel) else ()
    drafter = _mixed(draft, drafter, target, resolved)
    rounded = target.lm.source.rounded if isinstance(target, NativeTarget) else ""
    return Parts(
        target,
        drafter,
        _policy(policy, drafter, options),
        loaded.tokenizer,
        (target.lm, *drafted),
        [note for note in (rounded, _note(target, draft, drafter)) if note],
    )


@_as_if_alone()
def draft_for(target: "Target", tokenizer: Any, draft: str, options: "LoadOptions") -> Drafter:
    """Return one more draft for a target that is loaded, as `load` would; raises the same errors."""
    resolved = dataclasses.replace(options, graphs=target.captured)
    return cast(
        Drafter, _mixed(draft, _maker(draft, resolved)(target, tokenizer), target, resolved)
    )


def check_draft(draft: Any, options: "LoadOptions") -> None:
    """Raise the errors of loading this draft that show before any weights are read."""
    _maker(draft, options)


def _mixed(
    draft: Any, drafter: Drafter | None, target: "Target", options: "LoadOptions"
) -> Drafter | None:
    """Return the drafter with lookup, where that is wanted."""
    lookup = options.lookup
    require_input(
        f"lookup: draft {draft or 'none'!r} has no distributions to mix copies into; accepted with a head or a "
        "smaller model",
        not lookup or (drafter is not None and drafter.about.lookup is not False),
    )
    if lookup is None:
        by_default = drafter is not None and drafter is not draft and drafter.about.lookup is True
        eager = target.device.type == "cpu" and not options.graphs
        # which the host drafts from in any case
        lookup = by_default and (eager or isinstance(drafter, Recycling))
    return (
        Lookup(cast(Drafter, drafter), None if isinstance(drafter, Recycling) else Recycling())
        if lookup
        else drafter
    )


def _pair(
    loaded: LoadedModel, draft: Any, policy: Any, drafts: bool, options: "LoadOptions"
) -> "tuple[HuggingFaceTarget | NativeTarget, Drafter | None]":
    """Return target and draft, both for graphs or neither; no draft where none was asked for and the target has no use
    for it. UnsupportedModelError where one was."""
    target = _target(loaded, options)
    if options.context is not None:
        lm, context = target.lm, options.context
        limit = min(target.max_context, lm.max_context)
        fixed = (
            fixed_context(lm.config)
            if limit == lm.max_context
            else f"strict attention ends with its window of {limit}"
        )
        require("context", context, f"2 to {limit}: {fixed}", context <= limit or not fixed)
        lm.widen(context)
        target.max_context = context
    if drafts and isinstance(target, OwnCacheTarget) and (options.strict or not target.trees):
        if options.strict or draft is not None or policy is not None:
            what = "strict" if options.strict else "draft" if draft is not None else "policy"
            raise UnsupportedModelError(
                f"{what}: {target.cause}; this model is served with policy='plain'"
            )
        drafts = False
    alone = dataclasses.replace(options, tp_plan=None)
    return target, _maker(draft, alone)(target, loaded.tokenizer) if drafts else None


def _target(loaded: LoadedModel, options: "LoadOptions") -> "HuggingFaceTarget | NativeTarget":
    model = loaded.model
    if isinstance(model, NativeLM):
        return NativeTarget(model)
    if options.tp_plan is not None:
        return lead_or_follow(model, strict=options.strict, reason=loaded.reason)
    return target_of(
        model,
        pack=options.pack,
        strict=options.strict,
        captured=bool(options.graphs),
        merge=loaded.own,
        reason=loaded.reason,
    )


def _checked(field: str, name: Any) -> Any:
    """Return the name, or the model without the wrappers of PEFT.

    InputError for a string that is no path and no id, as it is no Unicode or too long.
    """
    if not isinstance(name, str):
        return name if name is None else model_in(field, name)
    try:
        os.lstat(name)
    except ValueError as error:
        raise InputError(
            f"{field}: got {shown(name)}, accepted a name or a path ({error})"
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(
                f"{field}: got {shown(name)}, accepted a name or a path (it is too long)"
            ) from error
    return name


def _check_names(draft: Any, policy: Any, options: "LoadOptions") -> None:
    if policy == "plain":
        require_input(
            "draft: policy 'plain' decodes without a draft; leave one of them out",
            draft in (None, *PLAIN),
        )
        require_input("policy_options: policy 'plain' has no options", not options.policy_options)
    elif policy is not None and isinstance(draft, str) and draft in PLAIN:
        raise InputError(
            f"policy: draft {draft!r} is plain decoding, which has no policy; leave one of them out"
        )
    elif policy is not None:
        policies.of(policy, options.policy_options)
    else:
        require_input(
            "policy_options: they need a policy given by name", not options.policy_options
        )
    require_input(
        "draft_options: they need a draft given by name, as ngram, or by path, as an EAGLE head",
        not options.draft_options or (isinstance(draft, str) and draft not in PLAIN),
    )


def _maker(draft: Any, options: "LoadOptions") -> Maker:
    """Return the function that makes the draft once the target is there."""
    return (
        (lambda target, tokenizer: draft)
        if isinstance(draft, Drafter)
        else functools.partial(_own_draft, options=options)
        if draft is None
        else drafters.maker(draft, options, CHECKPOINTS)
    )


def _own_draft(target: Any, tokenizer: Any, options: "LoadOptions") -> Drafter:
    """Make the draft for a target: its own one, else the head of what it is a fine-tune of, else recycling."""
    name = _default(target)
    if name == RECYCLING and (match := _head_for(target)) is not None:
        with contextlib.suppress(InputError, UnsupportedModelError, CheckpointError):
            return drafters.maker(match.head.name, options, CHECKPOINTS)(target, tokenizer)
    return drafters.maker(name, options, CHECKPOINTS)(target, tokenizer)


def _default(target: "HuggingFaceTarget | NativeTarget") -> str:
    """Return the draft by a target's name: the head that ships for it, or its own MTP head, else recycled tokens."""
    return (
        embedded.HEAD
        if target.name and embedded.draft_head(target.name) is not None
        else "mtp"
        if mtp.is_stored(target.name, target.lm)
        else RECYCLING
    )


def _head_for(target: "HuggingFaceTarget | NativeTarget") -> likeness.Match | None:
    """Return the head of the model that a target is a fine-tune of; None where it is split over ranks."""
    return None if isinstance(target, ShardedTarget) else likeness.find(target.lm)


def _note(target: "HuggingFaceTarget | NativeTarget", draft: Any, drafter: Drafter | None) -> str:
    """Return a note for the user, if the context is short or another draft may be better."""
    whole = getattr(target.lm.config, "max_position_embeddings", None) or 0
    if isinstance(target, NativeTarget) and target.lm.max_context < whole:
        return (
            f"native: the context ends with LongRoPE's original {target.lm.max_context} tokens; "
            f"backend='huggingface' has all {whole}"
        )
    if (
        draft is None
        and drafter is not None
        and target.name
        and (missing := embedded.missing_head(target.name))
    ):
        return f"draft: recycled tokens, because {missing}"
    if draft is None and drafter is not None and isinstance(innermost(drafter), EagleDraft):
        match = _head_for(target) if _default(target) == RECYCLING else None
        return "" if match is None else match.note
    model = drafter.inner if isinstance(drafter, Lookup) else drafter
    if isinstance(model, SmallModel) and _size(model.lm) >= _size(target.lm):
        shipped = (
            f"; the head that ships is draft={embedded.HEAD!r}" if draft == embedded.NAME else ""
        )
        return (
            f"draft: {model.name} is a whole model of no fewer weights than the target, so a draft pass costs as much "
            f"as plain decoding{shipped}"
        )
    return ""


def _size(lm: "LanguageModel") -> int:
    """Return how large a model is, for a comparison: its layers by the square of its width."""
    return int(lm.layers) * int(getattr(lm.config, "hidden_size", 0)) ** 2


def _policy(policy: Any, drafter: Drafter | None, options: "LoadOptions") -> TreePolicy | None:
    return (
        None
        if drafter is None
        else policies.make(drafter.about.policy, **drafter.about.options)
        if policy is None
        else policies.of(policy, options.policy_options)
    )
