"""Ways to run the model on a CPU: this engine's backends and llama.cpp, all behind one function of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGUFReader
from torch import nn

from specengine import Engine
from specengine import checkpoints as models
from specengine.benchmark.baselines import Generate
from specengine.benchmark.llama import Binding, decode, has_binding
from specengine.checkpoints import embedded
from specengine.errors import SpecEngineError


class Unavailable(Exception):
    """This way cannot run here; the message says why."""


class Answer(NamedTuple):
    tokens: int
    acceptance_length: float = 0.0  # 0 without a draft


Way = Callable[[list[int]], Answer]  # a prompt's token ids to its answer


@dataclass(frozen=True)
class Kind:
    """How an engine runs the target's forward."""

    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    packed_file: bool = False  # straight from the GGUF file


KINDS = {
    "huggingface": Kind("huggingface"),
    "native": Kind("native"),
    "native int8": Kind("native", {"quantize": "int8"}),
    "native gguf": Kind("native", packed_file=True),
}


@dataclass
class Given:
    """The model of a run, and what has been loaded of it so far.

    model  a name or a path, None is the embedded model; `gguf` is its GGUF file, by default the embedded model's in
           the cache folder
    """

    model: str | None = None
    gguf: Path | None = None
    draft: str | None = None
    dtype: str = "bfloat16"
    _engines: dict[str, Engine] = field(default_factory=dict)

    def engine(self, kind: str) -> Engine:
        """The engine with the default draft; Unavailable where it cannot be had, or runs as something else."""
        if kind not in self._engines:
            self._engines[kind] = self._load(kind, self.draft or self._shipped_head)
        return self._engines[kind]

    def plain(self, kind: str) -> Engine:
        """The same target without a draft."""
        engine = self.engine(kind)
        return Engine(engine.target, None, None, engine.tokenizer)

    def only(self, kind: str, tokenizer: Any) -> Engine:
        """An engine without a draft and with nothing else loaded."""
        return self._load(kind, "none", tokenizer)

    @cached_property
    def folder(self) -> str:
        return models.resolve(self.model)

    @property
    def transformers_model(self) -> Any:
        return self.engine("huggingface").target.model  # type: ignore[attr-defined]

    @property
    def end_tokens(self) -> set[int]:
        ends = self.transformers_model.generation_config.eos_token_id
        return set(ends if isinstance(ends, list) else [ends]) - {None}

    def gguf_file(self) -> Path:
        """Unavailable where there is none."""
        if self.gguf is None and self.model is None:
            found = models.cache_dir().rglob(Path(embedded.GGUF.name).name)
            self.gguf = next((file for file in found if embedded.GGUF.damage(file) is None), None)
        if self.gguf is None:
            raise Unavailable("no GGUF file of this model in the cache folder; name it with --gguf")
        if not self.gguf.is_file():
            raise Unavailable(f"there is no file {self.gguf.name}")
        return self.gguf

    def weight_bytes(self, kind: str) -> int:
        """What one forward reads: the linear layers and the head, in this kind's form."""
        if KINDS[kind].packed_file:
            tensors = {tensor.name: tensor for tensor in GGUFReader(self.gguf_file()).tensors if len(tensor.shape) > 1}
            if "output.weight" in tensors:  # else the embedding is the head too
                del tensors["token_embd.weight"]
            return sum(int(tensor.n_bytes) for tensor in tensors.values())
        linears = [module for module in self.transformers_model.modules() if isinstance(module, nn.Linear)]
        numbers = sum(linear.weight.numel() for linear in linears)
        return numbers * (1 if "quantize" in KINDS[kind].options else getattr(torch, self.dtype).itemsize)

    @property
    def _shipped_head(self) -> str | None:
        # by its path, as the folder's name and the GGUF file's differ and all ways should have the same draft
        head = embedded.draft_head(self.model or embedded.NAME)
        return str(head) if head else None

    def _load(self, name: str, draft: str | None, tokenizer: Any = None) -> Engine:
        kind = KINDS[name]
        options = {**kind.options, "backend": kind.backend, "device": "cpu", "tokenizer": tokenizer}
        model = str(self.gguf_file()) if kind.packed_file else self.folder
        if not kind.packed_file:
            options["dtype"] = self.dtype
        try:
            engine = Engine.from_pretrained(model, draft, **options)
        except SpecEngineError as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        runs = type(engine.target).__module__.rsplit(".", 1)[-1]
        if runs != kind.backend:
            raise Unavailable(f"asked for {kind.backend}, the engine runs {runs}")
        return engine


def generate(model: Any, length: int, *, whole: bool = False, **options: Any) -> Way:
    """transformers' `generate`. whole: `length` tokens whatever they are."""
    if whole:
        options["min_new_tokens"] = length
    decode = Generate(model, {"temperature": 0.0}, [], **options)
    return lambda prompt: Answer(len(decode(prompt, length).tokens))


def engine_way(engine: Engine, length: int, ends: set[int], *, whole: bool = False) -> Way:
    def run(prompt: list[int]) -> Answer:
        result = engine.generate(prompt, max_new_tokens=length, eos_token_id=[] if whole else sorted(ends))
        return Answer(len(result.token_ids), result.stats.mean_acceptance_length if engine.drafter else 0.0)

    return run


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's greedy decoding through its Python binding; Unavailable without it or without a GGUF file."""

    llama: Any
    length: int
    ends: set[int]
    whole: bool
    settings: dict[str, Any]  # for the record

    @classmethod
    def of(cls, given: Given, context: int, length: int, *, whole: bool = False) -> LlamaCpp:
        """context: tokens of the longest prompt and its answer."""
        if not has_binding():
            raise Unavailable("llama-cpp-python is not installed")
        binding = Binding(given.gguf_file(), context, torch.device("cpu"), {}, given.end_tokens)
        return cls(binding.llama, length, given.end_tokens, whole, {**binding.facts, "context": context})

    def __call__(self, prompt: list[int]) -> Answer:
        return Answer(len(decode(self.llama, prompt, self.length, () if self.whole else self.ends, {})))
