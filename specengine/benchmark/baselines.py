"""Baselines without this engine: transformers' `generate`, its prompt lookup and its assisted decoding."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig

from specengine.benchmark.summaries import Answer
from specengine.benchmark.ways import Way
from specengine.checking import huggingface_model
from specengine.checkpoints.pretrained import load_model
from specengine.drafters.small_model import check_tokenizers
from specengine.engine import Engine
from specengine.errors import InputError
from specengine.options import LoadOptions

GENERATE, COMPILED, LOOKUP, ASSISTED = "generate", "generate-compiled", "prompt-lookup", "assisted"
LOOKUP_TOKENS = 10


class Generate:
    """transformers' `generate` on a model it has loaded; `more` are keywords of it. Sampling has noise of its own."""

    def __init__(self, model: Any, options: dict[str, Any], ends: list[int], **more: Any) -> None:
        self._model, self._seed, self._more = model, options.get("seed"), more
        shown = {name: value for name, value in more.items() if isinstance(value, int)}
        self.facts = {"policy": "transformers generate" + (f", {shown}" if shown else "")}
        self._options: dict[str, Any] = {"do_sample": options["temperature"] > 0}
        if self._options["do_sample"]:
            self._options |= {name: options[name] for name in ("temperature", "top_k", "top_p")}
        if ends:
            self._options |= {"eos_token_id": ends, "pad_token_id": ends[0]}

    def __call__(self, prompt: list[int], length: int) -> Answer:
        ids = torch.tensor([prompt], device=self._model.device, dtype=torch.int64)
        if self._options["do_sample"]:
            torch.manual_seed(self._seed or 0)
        began = time.perf_counter()
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **self._options, **self._more
        )
        tokens = out[0, len(prompt) :].tolist()
        return Answer(tokens, len(prompt), time.perf_counter() - began)

    def prepare(self, tokens: int) -> None:
        """Do nothing: the cache grows as needed."""


def way(
    name: str, plain: Engine, options: dict[str, Any], ends: list[int], assistant: str, load_options: LoadOptions
) -> Way:
    """Return a baseline on the target of `plain`; assistant: a smaller model with the same tokenizer, by id or path."""

    @functools.cache
    def more() -> dict[str, Any]:
        if name == COMPILED:  # which transformers does on a GPU by itself
            config = CompileConfig()
            config._compile_all_devices = True  # noqa: SLF001  on a CPU as well, for which there is no public field
            return {"cache_implementation": "static", "compile_config": config}
        if name == LOOKUP:
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        return {"assistant_model": _assistant(assistant, plain, load_options)} if name == ASSISTED else {}

    facts = {"draft": Path(assistant).name} if name == ASSISTED else {}
    return Way(
        name, lambda: Generate(huggingface_model(plain.target), options, ends, **more()), ours=False, facts=facts
    )


def _assistant(assistant: str, plain: Engine, load_options: LoadOptions) -> Any:
    as_target: dict[str, Any] = {
        "device": plain.target.device,
        "backend": "huggingface",
        "quantize": None,
        "numerics": "auto",
    }
    model, tokenizer, *_ = load_model(assistant, dataclasses.replace(load_options, **as_target))
    if tokenizer is not None and plain.tokenizer is not None:
        check_tokenizers(tokenizer, plain.tokenizer)
    return model


def refuse_assistant(assistant: str | None, wanted: bool) -> None:
    """Raise InputError where an assistant is missing, idle, or a path that leads nowhere."""
    if wanted and assistant is None:
        raise InputError(f"assistant: way {ASSISTED} needs a smaller model with the target's tokenizer, name it")
    if assistant is not None and not wanted:
        raise InputError(f"assistant: no way uses it; add way {ASSISTED}")
    if assistant is not None and assistant.startswith(("/", ".", "~")) and not Path(assistant).exists():
        raise InputError(f"assistant: {assistant} does not exist")
