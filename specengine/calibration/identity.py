"""What measured costs depend on, so that they are found again where it is the same."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from specengine.drafters import Drafter
from specengine.models import Target
from specengine.models.extension import thread_count

CPU_FACTS = Path("/proc/cpuinfo")


def identity(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    """JSON-ready and readable: model, draft, device and how they run here."""
    lm: Any = getattr(target, "lm", None)
    return {
        "model": target.name or type(target).__name__,
        "parameters": getattr(lm, "parameters", None),
        "config": _config(target, lm),
        "draft": None if drafter is None else drafter.name,
        "draft parameters": None if drafter is None else sum(map(_size, drafter.weights)),
        "draft head": _head(drafter),
        "device": device_name(target.device),
        "dtype": str(getattr(target, "dtype", None)).removeprefix("torch."),
        "backend": target.backend,
        "packed": getattr(lm, "packed", None),
        "strict": getattr(target, "strict_rows", 0) > 0,
        "captured": target.captured,
        "threads": thread_count() if target.device.type == "cpu" else None,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "specengine": _version(),
    }


def device_name(device: torch.device) -> str:
    """Of the processor, as its maker calls it where the system says so."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def digest(facts: dict[str, Any]) -> str:
    """32 hexadecimal digits of JSON-ready facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _config(target: Target, lm: Any) -> str:
    config = getattr(lm, "config", None)
    sizes = {"vocabulary": target.vocab_size, "context": target.max_context}
    return digest(sizes | ({} if config is None else config.to_dict()))


def _head(drafter: Any) -> str | None:
    """Of an EAGLE head, whatever stands before it: its sizes, and what the C++ forward keeps its weights as."""
    while hasattr(drafter, "drafter"):
        drafter = drafter.drafter
    head = getattr(drafter, "head", None)
    return None if head is None else digest(asdict(head.config) | {"stored": getattr(head, "stored", None)})


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _version() -> str:
    try:
        return importlib.metadata.version("specengine")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
