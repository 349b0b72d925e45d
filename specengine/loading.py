"""Loading: from names, paths or loaded models to a target, a draft and a policy that fit together."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from specengine import checkpoints as models
from specengine import drafters, policies, registry
from specengine.checkpoints import dialects
from specengine.checkpoints import eagle as checkpoints
from specengine.drafters import Drafter
from specengine.drafters._captured_eagle import CapturedEagle
from specengine.drafters._captured_small_model import CapturedSmallModel
from specengine.drafters._native_eagle import NativeEagle
from specengine.drafters.eagle import Eagle, require_fit
from specengine.drafters.lookup import Lookup
from specengine.drafters.ngram import NGram
from specengine.drafters.small_model import SmallModel, check_tokenizers
from specengine.errors import CheckpointError, InputError, SpecEngineError, UnsupportedModelError
from specengine.modeling import native
from specengine.modeling.causal_lm import CausalLM
from specengine.modeling.eagle_head import head_from
from specengine.modeling.native import NativeLM
from specengine.modeling.opening import Opened, is_gguf, open_gguf, open_native
from specengine.policies import TreePolicy
from specengine.targets import Target
from specengine.targets.captured import CapturedTarget
from specengine.targets.huggingface import HuggingFaceTarget
from specengine.targets.native import NativeTarget

PLAIN = ("plain", "none")
BACKENDS = ("native", "huggingface")
_DTYPES = {
    "auto": "auto",
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass
class LoadOptions:
    """How models are loaded.

    dtype              auto (as stored), bfloat16, float16, float32 or a torch.dtype
    device             a torch device; by default cuda where there is one, and the target's for a draft
    tokenizer          for a target given as a loaded model; by default that of its name
    draft_options      options of a draft given by name or path
    policy_options     options of a policy given by name
    offline            never use a network
    trust_remote_code  run modeling code from a model's repository
    lookup             mix into a head's or smaller model's distributions what followed the same words before in prompt
                       and answer (drafters/lookup.py); by default on a CPU without graphs; a Drafter is taken as it is
    backend            what runs models of the Llama family on a CPU: `native`, the C++ forward, or `huggingface`, the
                       model's own modules, which run everything else as well; None takes native where it can
    quantize           `int8` keeps a native model's linear weights as int8 with a scale per output: half the memory of
                       bfloat16, other rounding
    pack               run bfloat16 linear layers on a CPU with a second, packed copy of their weights: faster, bit for
                       bit the same; by default where half of the free memory has room for it
    graphs             run target and draft as CUDA graphs, captured once per padded size (Engine.warmup captures all at
                       once); None is True on a CUDA device where model and draft can, and False elsewhere;
                       without a CUDA device the same padded forwards run uncaptured, which only tests have a use for
    loop               with graphs: where trees grow. `host`: a read per draft pass; `read`, `ahead`, `while`: on the
                       device, and how the end of a tree is seen there (see captured.py); `auto`: `read` where draft and
                       policy can, else `host`
    compile_blocks     with graphs: the target's norms and feed-forward layers through torch.compile, on first use
    strict             verify so that a token's logits have the same bits in every tree and in plain decoding: then half
                       precision is as exact as float32; costs more per node
    progress           called with lines about what takes long; by default they go to stderr
    """

    dtype: Any = "auto"
    device: Any = None
    tokenizer: Any = None
    draft_options: dict[str, Any] = field(default_factory=dict)
    policy_options: dict[str, Any] = field(default_factory=dict)
    offline: bool = False
    trust_remote_code: bool = False
    lookup: bool | None = None
    backend: str | None = None
    quantize: str | None = None
    pack: bool | None = None
    graphs: bool | None = None
    loop: str = "auto"
    compile_blocks: bool = False
    strict: bool = False
    progress: Callable[[str], None] | None = None

    @classmethod
    def names(cls) -> list[str]:
        return [item.name for item in dataclasses.fields(cls)]

    @classmethod
    def of(cls, options: dict[str, Any]) -> LoadOptions:
        for name in options:
            if name not in cls.names():
                raise InputError(f"unknown option {name!r}, known are {', '.join(cls.names())}")
        self = cls(**options)
        if not isinstance(self.dtype, torch.dtype):
            if self.dtype is not None and self.dtype not in _DTYPES:
                raise InputError(f"dtype: got {self.dtype!r}, accepted {', '.join(_DTYPES)} or a torch.dtype")
            self.dtype = _DTYPES[self.dtype or "auto"]
        if self.backend not in (None, *BACKENDS):
            raise InputError(f"backend: got {self.backend!r}, accepted {', '.join(BACKENDS)} or none")
        if self.quantize not in (None, *native.QUANTIZATIONS):
            raise InputError(f"quantize: got {self.quantize!r}, accepted {', '.join(native.QUANTIZATIONS)} or none")
        if self.compile_blocks and not self.graphs:
            raise InputError("compile_blocks: it is for the padded forwards of graphs; add graphs=True")
        self.device = _device(self.device) if self.device is not None else None
        return self


@dataclass(frozen=True)
class HeadOptions:
    """How an EAGLE head's config is read where it cannot be taken at its word (see models.checkpoints.load_head)."""

    producer: str | None = None
    layer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    target: HuggingFaceTarget | NativeTarget
    drafter: Drafter | None
    policy: TreePolicy | None
    tokenizer: Any


def load(
    model: str | PreTrainedModel | None,
    draft: str | PreTrainedModel | Drafter | None,
    policy: str | TreePolicy | None,
    options: LoadOptions,
) -> Parts:
    """The parts for these names; cheap checks come before any weights are read."""
    _check_names(draft, policy, options)
    if not isinstance(model, str | None) and (options.dtype != "auto" or options.device is not None):
        raise InputError("dtype, device: the model is loaded already; load it as wanted, or pass its name")
    loaded = _loaded(model, options, options.tokenizer)
    try:
        target, drafter = _pair(loaded, draft, policy, dataclasses.replace(options, graphs=_captures(loaded, options)))
    except (InputError, UnsupportedModelError) as error:
        if options.graphs is not None or not _captures(loaded, options):
            raise
        loaded = loaded._replace(reason=f"no graphs: {error}")
        target, drafter = _pair(loaded, draft, policy, dataclasses.replace(options, graphs=False))
    if _looks_up(options.lookup, draft, drafter, target):
        drafter = Lookup(cast(Drafter, drafter))
    return Parts(target, drafter, _policy(policy, drafter, options), loaded.tokenizer)


def _captures(loaded: _Loaded, options: LoadOptions) -> bool:
    """Whether graphs are tried: unasked on a CUDA device."""
    unasked = not isinstance(loaded.model, NativeLM) and loaded.model.device.type == "cuda"
    return unasked if options.graphs is None else options.graphs


def _pair(
    loaded: _Loaded, draft: Any, policy: Any, options: LoadOptions
) -> tuple[HuggingFaceTarget | NativeTarget, Drafter | None]:
    """Target and draft, both for graphs or neither."""
    if options.graphs:
        _check_graphs(draft, options)
    target = _target(loaded, options)
    options = dataclasses.replace(options, device=target.device)
    return target, None if policy == "plain" else _drafter(draft, target, loaded.tokenizer, options)


def _target(loaded: _Loaded, options: LoadOptions) -> HuggingFaceTarget | NativeTarget:
    model = loaded.model
    if isinstance(model, NativeLM):
        return NativeTarget(model)
    if options.graphs:
        return CapturedTarget(model, pack=options.pack, strict=options.strict, compile_blocks=options.compile_blocks)
    return HuggingFaceTarget(model, pack=options.pack, strict=options.strict, reason=loaded.reason)


def load_eagle(
    folder: Path,
    target: CausalLM | NativeLM,
    options: HeadOptions,
    *,
    pack: bool | None = None,
    graphs: bool | None = None,
) -> Eagle:
    """The EAGLE head in `folder` as a draft for `target`, in its dtype and on its device."""
    producer, layer_ids = cast(Any, options.producer), options.layer_ids
    config, state, _ = checkpoints.load_head(folder, producer=producer, layer_ids=layer_ids)
    require_fit(config, target)
    if isinstance(target, NativeLM) and pack is None:
        with contextlib.suppress(UnsupportedModelError):  # torch runs heads of all kinds
            return NativeEagle(config, state, target, name=folder.name)
    head = head_from(config, state, target.dtype, target.device)
    return (CapturedEagle if graphs else Eagle)(head, target, name=folder.name, pack=pack)


def head_folder(draft: str, *, offline: bool = False) -> Path | None:
    """The folder of the EAGLE head with this path or Hub id, fetched if need be; None where it is no head."""
    if Path(draft).is_dir():
        return Path(draft) if checkpoints.is_head(draft) else None
    try:
        config, _ = PretrainedConfig.get_config_dict(draft, local_files_only=offline)
        if not dialects.names_head(config):
            return None
        for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
            missing = {"_raise_exceptions_for_missing_entries": False}
            file = cached_file(draft, name, local_files_only=offline, **missing)
            if file is not None and name != "config.json":
                return Path(file).parent
    except OSError:
        return None  # whoever loads it as a model says why it cannot be had
    return None


def _check_names(draft: Any, policy: Any, options: LoadOptions) -> None:
    if policy == "plain":
        if draft not in (None, *PLAIN):
            raise InputError("draft: policy 'plain' decodes without a draft; leave one of them out")
    elif policy is not None and isinstance(draft, str) and draft in PLAIN:
        raise InputError(f"policy: draft {draft!r} leaves nothing for a policy to shape; leave one of them out")
    elif isinstance(policy, str):
        policies.make(policy, **options.policy_options)
    elif policy is not None and not isinstance(policy, TreePolicy):
        raise InputError(f"policy: got {policy!r}, accepted {', '.join(policies.names())} or a TreePolicy")
    if options.policy_options and not isinstance(policy, str):
        raise InputError("policy_options: they need a policy given by name")
    if options.graphs:
        _check_graphs(draft, options)
    if draft == "ngram":
        registry.build(registry.find(drafters, Drafter, "ngram", "draft"), options.draft_options, "draft ngram")  # type: ignore[type-abstract]
    elif isinstance(draft, str) and draft not in PLAIN:
        registry.build(HeadOptions, options.draft_options, "draft_options")
    elif options.draft_options:
        raise InputError(
            "draft_options: they need a draft given by name, known are ngram, or the path of an EAGLE head"
        )


def _drafter(
    draft: Any, target: HuggingFaceTarget | NativeTarget, tokenizer: Any, options: LoadOptions
) -> Drafter | None:
    if isinstance(draft, str) and draft in PLAIN:
        return None
    if isinstance(draft, Drafter):
        return draft
    if draft is None:
        folder = models.embedded.draft_head(target.name) if target.name else None
        if folder is not None:
            return load_eagle(folder, target.lm, HeadOptions(), pack=options.pack, graphs=options.graphs)
    if draft is None or draft == "ngram":
        cls = registry.find(drafters, Drafter, "ngram", "draft")  # type: ignore[type-abstract]
        return registry.build(cls, options.draft_options, "draft ngram")
    if isinstance(draft, str) and draft != models.embedded.NAME:
        folder = head_folder(draft, offline=options.offline)
        if folder is not None:
            head_options = registry.build(HeadOptions, options.draft_options, "draft_options")
            return load_eagle(folder, target.lm, head_options, pack=options.pack, graphs=options.graphs)
    if options.draft_options:
        raise InputError(f"draft_options: draft {draft!r} has none, it is no EAGLE head")
    model, draft_tokenizer, _ = _loaded(draft, dataclasses.replace(options, quantize=None, backend=_of_draft(options)))
    if torch.device(model.device) != target.device:
        raise InputError(f"draft: it is on {model.device}, the target on {target.device}; both must be on one device")
    vocab_size = target.vocab_size
    if tokenizer is not None and draft_tokenizer is not None:
        check_tokenizers(draft_tokenizer, tokenizer)
    elif (draft_vocabulary := _vocabulary(model)) != vocab_size:
        raise InputError(
            f"draft: its vocabulary has {draft_vocabulary} entries, the target's {vocab_size}, and there are no "
            "two tokenizers to compare"
        )
    return (CapturedSmallModel if options.graphs else SmallModel)(model, vocab_size, pack=options.pack)


def _of_draft(options: LoadOptions) -> str | None:
    """The backend of a smaller model: native where it can, unless the target's is chosen otherwise."""
    return options.backend if options.backend == "huggingface" else None


def _check_graphs(draft: Any, options: LoadOptions) -> None:
    if isinstance(draft, Drafter) and not isinstance(draft, CapturedEagle | CapturedSmallModel | NGram):
        raise InputError(
            f"graphs, draft: a {type(draft).__name__} is taken as it is, and its passes are not captured; pass its "
            "model or the path of its head instead"
        )


def _vocabulary(model: PreTrainedModel | NativeLM) -> int:
    return model.vocab_size if isinstance(model, NativeLM) else model.get_input_embeddings().weight.shape[0]


def _looks_up(wanted: bool | None, draft: Any, drafter: Drafter | None, target: Target) -> bool:
    if wanted and (drafter is None or isinstance(drafter, Lookup | NGram)):
        raise InputError(f"lookup: draft {draft or 'none'!r} has no distributions to mix with; accepted with a model")
    if wanted is None:
        made_here = isinstance(drafter, Eagle | SmallModel) and drafter is not draft
        return made_here and target.device.type == "cpu" and not isinstance(target, CapturedTarget)
    return wanted


def _policy(policy: Any, drafter: Drafter | None, options: LoadOptions) -> TreePolicy | None:
    if drafter is None:
        return None
    if isinstance(policy, TreePolicy):
        return policy
    if policy is None:
        name, defaults = drafter.default_policy
        return policies.make(name, **defaults)
    return policies.make(policy, **options.policy_options)


class _Loaded(NamedTuple):
    """A model, its tokenizer, and why it is not the native forward that runs it."""

    model: PreTrainedModel | NativeLM
    tokenizer: Any
    reason: str = ""


def _loaded(model: str | PreTrainedModel | None, options: LoadOptions, tokenizer: Any = None) -> _Loaded:
    """The model, loaded where it is a name, and its tokenizer, unless one is given."""
    if not isinstance(model, str | None | PreTrainedModel):
        raise InputError(f"model: got {type(model).__name__}, accepted a name, a path or a loaded transformers model")
    reason = _not_native(model, options)
    if reason is None:
        try:
            return _Loaded(*_native(model, options, tokenizer))
        except UnsupportedModelError as error:
            if options.backend == "native" or options.quantize:
                raise
            reason = str(error)
    elif options.backend == "native" or options.quantize:
        raise InputError(f"backend, quantize: the native forward was asked for, but {reason}")
    return _Loaded(*_huggingface(model, options, tokenizer), reason)


def _not_native(model: str | PreTrainedModel | None, options: LoadOptions) -> str | None:
    """Why the native forward is out of the question whatever the model; None where it may be tried."""
    on_cpu = (options.device is None and not torch.cuda.is_available()) or options.device == torch.device("cpu")
    if isinstance(model, PreTrainedModel):
        on_cpu = model.device.type == "cpu"
    reasons = {
        "backend='huggingface' was asked for": options.backend == "huggingface",
        "it runs on a CPU alone": not on_cpu,
        "graphs are made of the model's own modules": bool(options.graphs),
        "pack= is an option of the Hugging Face backend": options.pack is not None,
        f"{native.NOT_BUILT}": not native.instruction_sets(),
        f"dtype {options.dtype} is none of bfloat16 and float32": options.dtype == torch.float16,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _native(model: str | PreTrainedModel | None, options: LoadOptions, tokenizer: Any) -> tuple[NativeLM, Any]:
    if isinstance(model, PreTrainedModel):
        name = model.config._name_or_path
        lm = native.from_model(model, quantize=options.quantize)
        return lm, tokenizer or (_tokenizer(name, options) if name else None)
    opened = open_native(model, dtype=options.dtype, offline=options.offline, progress=options.progress)
    return NativeLM(opened.source, quantize=options.quantize), tokenizer or _tokenizer_of(opened)


def _huggingface(
    model: str | PreTrainedModel | None, options: LoadOptions, tokenizer: Any
) -> tuple[PreTrainedModel, Any]:
    if isinstance(model, PreTrainedModel):
        name = model.config._name_or_path
        return model, tokenizer or (_tokenizer(name, options) if name else None)
    if model is not None and is_gguf(model):
        opened = open_gguf(model, options.dtype)
        return opened.source.model().to(options.device or default_device()), tokenizer or _tokenizer_of(opened)
    path = models.resolve(model, offline=options.offline, progress=options.progress)
    common = {"local_files_only": options.offline, "trust_remote_code": options.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **common)
        loaded, found = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=options.dtype, output_loading_info=True, ignore_mismatched_sizes=True, **common
        )
    except SafetensorError as error:
        raise CheckpointError(f"model {path!r}: its weights are damaged, fetch them again ({error})") from error
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UnsupportedModelError(f"model {path!r}: {error}") from error
    _require_weights(path, loaded, found)
    return loaded.to(options.device or default_device()), tokenizer or _tokenizer(path, options)


def _require_weights(path: str, model: PreTrainedModel, found: dict[str, Any]) -> None:
    """Raise CheckpointError where weights would be random: files that lack them, or have them in another shape."""
    problems = {
        "missing": sorted({name for name, _ in model.named_parameters()} & set(found["missing_keys"])),
        "of another shape": sorted(
            f"{name} {list(has)}, not {list(wants)}" for name, has, wants in found["mismatched_keys"]
        ),
    }
    listed = [f"{what}: {', '.join(names[:4])}" for what, names in problems.items() if names]
    if listed:
        raise CheckpointError(f"model {path!r}: its weights do not fit its config.json; {'; '.join(listed)}")


def _tokenizer_of(opened: Opened) -> Any:
    try:
        return opened.tokenizer()
    except (OSError, ValueError, KeyError, SpecEngineError) as error:
        print(f"no tokenizer for {opened.source.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _tokenizer(path: str, options: LoadOptions) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=options.offline, trust_remote_code=options.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        print(f"no tokenizer for {path}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device(device: Any) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device: got {device!r}, accepted cpu, cuda or cuda:N") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for, but torch sees no CUDA device")
    return chosen
