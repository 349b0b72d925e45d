"""Options of loading models, and their checks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.errors import InputError, did_you_mean, require_value, shown
from specengine.registry import is_array, plain

BACKENDS = ("native", "huggingface")
DEVICES = ("cpu", "cuda", "mps", "xpu")
QUANTIZATIONS = ("int8",)  # of a native model's weights
NUMERICS = ("auto", "bfloat16", "float32", "integer")  # of a native model's products
_DTYPES = {
    "auto": "auto",
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass
class LoadOptions:
    """Options of loading models.

    dtype              auto (as stored), bfloat16, float16, float32 or a torch.dtype
    device             cpu, cuda, cuda:N, mps or xpu; by default cuda where there is one, and the target's for a draft
    tokenizer          a tokenizer of transformers, or the path or Hub id of one; by default that of the target's name
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
    numerics           how a native model's products are computed: `integer` multiplies int8 weights and packed GGUF
                       blocks by int8 activations, with the same bits on every instruction set; `bfloat16` and `float32`
                       name the model's dtype and multiply floats; auto takes integer for such weights where the machine
                       has no AMX, and has AVX2 or NEON
    pack               run bfloat16 linear layers on a CPU with a second, packed copy of their weights: faster, bit for
                       bit the same; by default where half of the free memory has room for it
    graphs             run target and draft as CUDA graphs, captured on first use (Engine.warmup captures all at
                       once); None is True on a CUDA device where model and draft can, and False elsewhere;
                       without a CUDA device the same padded forwards run uncaptured, which only tests have a use for
    tp_plan            `auto` splits the target over the processes that torchrun started, by the plan that transformers
                       has for it; rank 0 drafts, and the others do not return from loading
    strict             verify so that a token's logits have the same bits in every tree and in plain decoding: then half
                       precision is as exact as float32; costs more per node
    context            tokens of prompt and answer that a text may have; by default as the model's config says
                       (max_position_embeddings, or what scaled positions reach)
    learn              a folder to keep prompts and answers in as token ids; an EAGLE head drafts by what `specengine
                       learn` has made of it there, without graphs
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
    numerics: str = "auto"
    pack: bool | None = None
    graphs: bool | None = None
    tp_plan: str | None = None
    strict: bool = False
    context: int | None = None
    learn: Any = None
    progress: Callable[[str], None] | None = None

    @classmethod
    def names(cls) -> list[str]:
        return [item.name for item in dataclasses.fields(cls)]

    @classmethod
    def of(cls, options: dict[str, Any]) -> LoadOptions:
        for name in options:
            if name not in cls.names():
                listed = ", ".join(cls.names())
                raise InputError(f"unknown option {shown(name)}, known are {listed}{did_you_mean(name, cls.names())}")
        self = cls(**{name: plain(value) if is_array(value) else value for name, value in options.items()})
        self._check_kinds()
        if not isinstance(self.dtype, torch.dtype):
            if self.dtype is not None and (not isinstance(self.dtype, str) or self.dtype not in _DTYPES):
                raise InputError(f"dtype: got {shown(self.dtype)}, accepted {', '.join(_DTYPES)} or a torch.dtype")
            self.dtype = _DTYPES[self.dtype or "auto"]
        for name, accepted in (("backend", BACKENDS), ("quantize", QUANTIZATIONS)):
            value = getattr(self, name)
            require_value(name, value, f"{', '.join(accepted)} or none", value in (None, *accepted))
        require_value("numerics", self.numerics, ", ".join(NUMERICS), self.numerics in NUMERICS)
        if self.tp_plan is not None:
            self._check_splitting()
        self._check_tokenizer()
        self.device = _device(self.device) if self.device is not None else None
        return self

    def _check_tokenizer(self) -> None:
        fits = self.learn is None or isinstance(self.learn, os.PathLike | str)
        require_value("learn", self.learn, "a folder or none", fits)
        tokenizer = self.tokenizer
        named = tokenizer is None or isinstance(tokenizer, os.PathLike | str)
        fits = named or (callable(tokenizer) and hasattr(tokenizer, "decode"))
        require_value("tokenizer", tokenizer, "a tokenizer of transformers, or a path or Hub id of one", fits)

    def _check_splitting(self) -> None:
        require_value("tp_plan", self.tp_plan, "auto or none", self.tp_plan == "auto")
        given = {name: getattr(self, name) for name in ("quantize", "pack", "graphs", "device")}
        given |= {"backend": self.backend == "native", "numerics": self.numerics != "auto"}
        if alone := [name for name, value in given.items() if value]:
            raise InputError(f"tp_plan: got {', '.join(alone)} too, which are for a model in one process")

    def _check_kinds(self) -> None:
        for name in ("draft_options", "policy_options"):
            value = getattr(self, name)
            by_name = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
            require_value(name, value, "a dict of options by name", by_name)
        fits = self.context is None or (type(self.context) is int and self.context >= 2)
        require_value("context", self.context, "a whole number of tokens, 2 or more, or none", fits)
        for name in ("offline", "trust_remote_code", "strict"):
            value = getattr(self, name)
            require_value(name, value, "True or False", isinstance(value, bool))
        for name in ("lookup", "pack", "graphs"):
            value = getattr(self, name)
            require_value(name, value, "True, None or False", isinstance(value, bool | None))


def _device(device: Any) -> torch.device:
    wanted = f"device: got {shown(device)}, accepted cpu, cuda, cuda:N, mps or xpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(wanted) from error
    if chosen.type not in DEVICES:
        raise InputError(wanted)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device: cuda was asked for, but torch sees no CUDA device")
    missing = {"mps": not torch.backends.mps.is_available(), "xpu": not torch.xpu.is_available()}
    if missing.get(chosen.type, False):
        raise InputError(f"device: {chosen.type} was asked for, but torch sees no such device")
    return chosen
