"""specengine inspect: what is installed here, what it runs on, and what there is to choose from."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import inspect
import json
import platform
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

import specengine
from specengine import drafters, models, ops, policies, registry
from specengine.checking import huggingface_target
from specengine.cli import arguments as shared
from specengine.drafters import Drafter
from specengine.engine import Engine
from specengine.models import store
from specengine.policies import TreePolicy

HELP = "show versions, devices, backends, policies, drafts and, with --model, a model"
PACKAGES = ("torch", "transformers", "triton", "flash-attn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    shared.add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    devices = _devices()
    found: dict[str, Any] = {
        "versions": _versions(),
        "devices": devices,
        "backends": {kind: _backends(kind) for kind in dict.fromkeys(name.partition(":")[0] for name in devices)},
        "cache": _cache(),
        "policies": _variants(policies, TreePolicy, "policy"),
        "drafters": _variants(drafters, Drafter, "draft"),
    }
    if arguments.model is not None:
        found["model"] = _model(arguments)
    print(json.dumps(found, ensure_ascii=False, default=str) if arguments.json else "\n".join(_lines(found)))
    return 0


def _versions() -> dict[str, str | None]:
    """Version by package; None where it is not installed."""
    versions: dict[str, str | None] = {"specengine": specengine.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _devices() -> dict[str, str]:
    threads = torch.get_num_threads()
    devices = {"cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        devices[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {capability}"
    return devices


def _backends(kind: str) -> dict[str, dict[str, Any]]:
    return {op: dataclasses.asdict(backend) for op, backend in ops.backends(kind).items()}


def _cache() -> dict[str, str]:
    root = models.cache_dir()
    folder = root / "models" / models.embedded.NAME
    state = "not there yet, it is fetched at first use"
    if folder.exists():
        damage = store.folder_damage(folder)
        state = f"damaged: {damage}" if damage else "ready"
    return {"folder": str(root), models.embedded.NAME: state}


def _variants(package: ModuleType, base: type, field: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name in registry.names(package):
        cls: type = registry.find(package, base, name, field)
        about = (inspect.getdoc(cls) or "").partition("\n")[0]
        found[name] = {"about": about, "options": dict(_options(cls)), "default policy": _default_policy(cls)}
    return found


def _options(cls: type) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if item.init:
            made = item.default_factory
            yield item.name, item.default if made is dataclasses.MISSING else made()


def _default_policy(cls: type) -> dict[str, Any] | None:
    if not issubclass(cls, Drafter):
        return None
    name, options = cls.default_policy
    return {"name": name, **options}


def _model(arguments: argparse.Namespace) -> dict[str, Any]:
    engine = Engine.from_pretrained(arguments.model, policy="plain", **shared.load_options(arguments))
    target = huggingface_target(engine.target)
    return {
        "name": arguments.model,
        "type": target.model.config.model_type,
        "parameters": sum(weights.numel() for weights in target.model.parameters()),
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "device": str(target.device),
        "layers": target.cache.slab.shape[0],
        "context": target.max_context,
        "vocabulary": target.vocab_size,
        "attention": target.lm.attention,
        "packed weights": target.lm.packed,
        "chat template": bool(getattr(engine.tokenizer, "chat_template", None)),
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    for title, entries in found.items():
        yield f"{title}"
        for name, value in entries.items():
            yield from _entry(name, value)


def _entry(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and "about" in value:
        yield f"  {name:<22}{value['about']}"
        if value["options"]:
            yield f"  {'':<22}{_assignments(value['options'])}"
        if value["default policy"]:
            yield f"  {'':<22}default policy: {_assignments(value['default policy'])}"
    elif isinstance(value, dict):
        for op, backend in value.items():
            others = ", ".join(backend["available"])
            yield f"  {name + ' ' + op:<28}{backend['name']} ({backend['reason']}; available: {others})"
    else:
        words = "not installed" if value is None else ("no", "yes")[value] if isinstance(value, bool) else value
        yield f"  {name:<22}{words}"


def _assignments(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={_as_typed(value)}" for name, value in options.items())


def _as_typed(value: Any) -> str:
    """A value as `-o key=value` takes it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
