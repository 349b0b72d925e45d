"""Answer under process-wide settings of torch: python -m tests.border.answers FOLDER BACKEND; prints JSON.

FOLDER holds `target`, `draft`, `eagle-3` and `eagle-1`. In a process of its own, as a buffer too small kills it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specengine import Engine
from tests.toy import POLICIES, policy_for

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 4}}
TOKENS = 6
DRAFTS: dict[str, tuple[str, ...]] = {
    "draft": tuple(name for name in POLICIES if name != "random"),
    "eagle-3": ("auto", "eagle", "salf"),
    "eagle-1": ("talon",),
    "recycling": ("auto",),
    "ngram": ("chain",),
}
FEW = ("auto", "eagle", "salf", "c2t", "dynatree")  # where no number's dtype changes
LOADED_BEFORE: tuple[str, ...] = ()  # settings under which engines cannot be loaded
REMEMBER = ("recycling", "loaded", "eagle-3")
WITHOUT = "none"


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Fresh memory is filled with NaN and the greatest integers, too."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "meta context": lambda: torch.device("meta"),
    "default device meta": lambda: default_device("meta"),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "gradients": lambda: torch.set_grad_enabled(True),
}


def load(folder: Path, backend: str) -> dict[str, Engine]:
    """An engine for each draft, of a loaded model, and in bfloat16, where a native head is int8."""
    common: dict[str, Any] = {"offline": True, "backend": backend, "device": "cpu"}
    target = str(folder / "target")
    engines = {}
    for draft in DRAFTS:
        name = str(folder / draft) if (folder / draft).is_dir() else draft
        lookup = draft == "eagle-3"
        engines[draft] = Engine.from_pretrained(
            target, name, dtype="float32", lookup=lookup, **common
        )
    engines["half"] = Engine.from_pretrained(
        target, str(folder / "eagle-3"), dtype="bfloat16", **common
    )
    with torch.device("cpu"):  # which transformers itself needs
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engines["loaded"] = Engine.from_pretrained(model, "recycling", backend=backend)
    return engines


def answers(
    engines: dict[str, Engine], names: Container[str] = POLICIES
) -> Iterator[tuple[str, Any]]:
    """Cases, and their tokens with the number of cycles: but under `auto`, in which a clock has a say, and of drafts
    that remember."""
    plain = engines["draft"]
    yield "score", [round(rated.logprob, 3) for rated in plain.score(PROMPT)]
    yield "logprobs", [[round(pair[1], 3) for pair in made.top] for made in _rated(plain)]
    for draft, engine in engines.items():
        for way, options in WAYS.items():
            found = engine.generate(PROMPT, max_new_tokens=TOKENS, policy="plain", **options)
            yield f"{draft} plain {way}", found.token_ids
            for policy in (
                policy for policy in DRAFTS.get(draft, ("auto", "eagle")) if policy in names
            ):
                engine.reset()
                found = engine.generate(
                    PROMPT, max_new_tokens=TOKENS, policy=policy_for(policy), **options
                )
                cycles = 0 if policy == "auto" or draft in REMEMBER else found.stats.num_spec_steps
                yield f"{draft} {policy} {way}", [found.token_ids, cycles]


def _rated(engine: Engine) -> Any:
    return engine.generate(PROMPT, max_new_tokens=TOKENS, policy="plain", logprobs=3).logprobs


def main(folder: str, backend: str) -> None:
    engines = load(Path(folder), backend)
    found = {WITHOUT: dict(answers(engines))}
    for name, setting in SETTINGS.items():
        names = POLICIES if "dtype" in name else FEW
        with setting():
            found[f"{name}, loaded before"] = dict(answers(engines, names))
            if name not in LOADED_BEFORE:
                found[name] = dict(answers(load(Path(folder), backend), names))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
