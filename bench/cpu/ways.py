"""Ways to run the model on a CPU: this engine's backends, and what they have of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from torch import nn

from specengine import Engine, checkpoints as models
from specengine.checkpoints import embedded
from specengine.errors import SpecEngineError


class Unavailable(SpecEngineError):
    """Raised if a method cannot run here. The message has the reason."""


@dataclass(frozen=True)
class Kind:
    """A way to run the target's forward."""

    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    packed_file: bool = False  # straight from the GGUF file
    # numerics of the native forward; else those of floats in the model's dtype
    integer: bool = False


KINDS = {
    "huggingface": Kind("huggingface"),
    "native": Kind("native"),
    "native int8": Kind("native", {"quantize": "int8"}),
    "native gguf": Kind("native", packed_file=True),
    "native int8, integer": Kind("native", {"quantize": "int8"}, integer=True),
    "native gguf, integer": Kind("native", packed_file=True, integer=True),
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
        """Load the engine with the default draft. Unavailable if it cannot be loaded, or runs as something else."""
        if kind not in self._engines:
            self._engines[kind] = self._load(kind, self.draft or self._shipped_head)
        return self._engines[kind]

    def plain(self, kind: str) -> Engine:
        """Return an engine on the same target without a draft."""
        engine = self.engine(kind)
        return Engine(engine.target, None, None, engine.tokenizer)

    def only(self, kind: str, tokenizer: Any) -> Engine:
        """Load an engine without a draft, and with nothing else loaded."""
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
        """Return the GGUF file. Unavailable if there is none."""
        if self.gguf is None and self.model is None:
            found = models.cache_dir().rglob(Path(embedded.GGUF.name).name)
            self.gguf = next((file for file in found if embedded.GGUF.damage(file) is None), None)
        if self.gguf is None:
            raise Unavailable("no GGUF file of this model in the cache folder; name it with --gguf")
        if not self.gguf.is_file():
            raise Unavailable(f"there is no file {self.gguf.name}")
        return self.gguf

    def weight_bytes(self, kind: str) -> int:
        """Return the bytes that one forward reads: the linear layers and the head, in this kind's form."""
        if KINDS[kind].packed_file:
            tensors = {
                tensor.name: tensor
                for tensor in GGUFReader(self.gguf_file()).tensors
                if len(tensor.shape) > 1
            }
            if "output.weight" in tensors:  # else the embedding is the head too
                del tensors["token_embd.weight"]
            return sum(int(tensor.n_bytes) for tensor in tensors.values())
        linears = [
            module for module in self.transformers_model.modules() if isinstance(module, nn.Linear)
        ]
        numbers = sum(linear.weight.numel() for linear in linears)
        return numbers * (
            1 if "quantize" in KINDS[kind].options else getattr(torch, self.dtype).itemsize
        )

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
        if kind.backend == "native":
            options["numerics"] = "integer" if kind.integer else options.get("dtype", "bfloat16")
        try:
            engine = Engine.from_pretrained(model, draft, memory="off", **options)
        except SpecEngineError as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        module = type(engine.target).__module__.removeprefix("specengine.models.")
        runs = module.partition(".")[0]
        if runs != kind.backend:
            raise Unavailable(f"asked for {kind.backend}, the engine runs {runs}")
        return engine
