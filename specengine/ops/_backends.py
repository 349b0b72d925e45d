"""Backends: which implementation runs an op on which device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from specengine import reference, reference_resident
from specengine.errors import BackendError

VARIABLE = "SPECENGINE_BACKEND"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """What runs an op: the backend `name` taken, the `reason`, and all that are `available` for it, best first."""

    name: str
    reason: str
    available: tuple[str, ...]


@dataclass(frozen=True)
class _Provider:
    """A set of implementations: on which device types (empty: all), how to load them (ImportError), how to build.

    interpreted: on CPU tensors as well, where TRITON_INTERPRET=1 lets Triton run its kernels there.
    """

    devices: tuple[str, ...]
    load: Callable[[], dict[str, Callable[..., Any]]]
    build: str
    interpreted: bool = False


def _load_reference() -> dict[str, Callable[..., Any]]:
    return {
        "ancestor_words": reference.ancestor_words,
        "subtree": reference.subtree,
        "append_nodes": reference.append_nodes,
        "tree_mask": reference.tree_mask,
        "select_best": reference.select_best,
        "top_children": reference.top_children,
        "best_candidates": reference.best_candidates,
        "top_entropy": reference.top_entropy,
        "mlp": reference.mlp,
        "classify_paths": reference.classify_paths,
        "classify_row": reference.classify_row,
        "beam_observation": reference.beam_observation,
        "best_action": reference.best_action,
        "best_first": reference.BestFirst,
        "keyed_gumbel_argmax": reference.keyed_gumbel_argmax,
        "choose_tokens": reference.choose_tokens,
        "walk": reference.walk,
        "compact_kv": reference.compact_kv,
        "pack_mask": reference.pack_mask,
        "tree_attention": reference.tree_attention,
        "cached_attention": reference.cached_attention,
        "rope_store": reference.rope_store,
        "strict_attention": reference.strict_attention,
        "order_paths": reference.order_paths,
        "strict_cached_attention": reference.strict_cached_attention,
        "select_nodes": reference_resident.select_nodes,
        "select_candidates": reference_resident.select_candidates,
        "step_queues": reference_resident.step_queues,
        "fill_queues": reference_resident.fill_queues,
        "hang_nodes": reference_resident.hang_nodes,
        "take_subtree": reference_resident.take_subtree,
        "gather_rows": reference_resident.gather_rows,
        "choose_rows": reference_resident.choose_rows,
        "walk_down": reference_resident.walk_down,
        "move_rows": reference_resident.move_rows,
    }


def _load_cpp() -> dict[str, Callable[..., Any]]:
    from specengine import native  # here, as it raises ImportError where the extension is missing

    return {
        "ancestor_words": native.ancestor_words,
        "append_nodes": native.append_nodes,
        "subtree": native.subtree,
        "tree_mask": native.tree_mask,
        "select_best": native.select_best,
        "top_children": native.top_children,
        "best_candidates": native.best_candidates,
        "top_entropy": native.top_entropy,
        "mlp": native.mlp,
        "classify_paths": native.classify_paths,
        "classify_row": native.classify_row,
        "beam_observation": native.beam_observation,
        "best_action": native.best_action,
        "best_first": native.BestFirst,
        "keyed_gumbel_argmax": native.keyed_gumbel_argmax,
        "walk": native.walk,
        "compact_kv": native.compact_kv,
        "strict_attention": native.strict_attention,
        "strict_cached_attention": native.strict_cached_attention,
    }


def _load_triton() -> dict[str, Callable[..., Any]]:
    from specengine import triton_kernels, triton_resident  # here: it raises ImportError where Triton is missing

    return triton_kernels.implementations() | triton_resident.implementations()


def _load_cuda() -> dict[str, Callable[..., Any]]:
    from specengine import cuda  # here, as it raises ImportError where the library is not built

    return cuda.implementations()


_PROVIDERS = {  # best first; a new backend is a new entry
    "cpp": _Provider(("cpu",), _load_cpp, "pip install -e ."),
    "reference": _Provider((), _load_reference, ""),
    # behind the reference, so on request alone: they have not been run on a device yet
    "triton": _Provider(("cuda",), _load_triton, "pip install -e '.[kernels]'", interpreted=True),
    "cuda": _Provider(("cuda",), _load_cuda, "SPECENGINE_CUDA=1 pip install -e ."),
}


def backends(device: torch.device | str = "cpu") -> dict[str, Backend]:
    """Which backend runs each op on `device`, and why; BackendError as for the ops themselves."""
    kind, asked = torch.device(device).type, os.environ.get(VARIABLE, "")
    return {op: _choose(op, kind, asked) for op in _load_reference()}


def implementation(op: str, kind: str) -> Callable[..., Any]:
    return _resolve(op, kind, os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=256)
def _resolve(op: str, kind: str, asked: str) -> Callable[..., Any]:
    return _loaded(_choose(op, kind, asked).name)[op]


def _choose(op: str, kind: str, asked: str) -> Backend:
    able = tuple(name for name, provider in _PROVIDERS.items() if _serves(provider, kind) and op in _loaded(name))
    if asked in ("", "auto"):
        better = list(_PROVIDERS)[: list(_PROVIDERS).index(able[0])]
        reason = "; ".join(_why_not(name, op, kind) for name in better)
        return Backend(able[0], reason or f"first choice on {kind}", able)
    names = asked.split(",")
    if not set(names) <= set(_PROVIDERS):
        raise BackendError(f"{VARIABLE}={asked}: unknown, accepted are auto, {', '.join(_PROVIDERS)}")
    missing = [name for name in names if not _loaded(name)]
    if missing:
        raise BackendError(f"{VARIABLE}={asked}: {_not_built(missing[0])}")
    taken = next((name for name in names if name in able), None)
    if taken is not None:
        return Backend(taken, f"{VARIABLE}={asked}", able)
    return Backend("reference", "; ".join(_why_not(name, op, kind) for name in names), able)


def _why_not(name: str, op: str, kind: str) -> str:
    if _serves(_PROVIDERS[name], kind) and not _loaded(name):
        return _not_built(name)
    return f"{name} has no {op} on {kind}"


def _not_built(name: str) -> str:
    return f"{name} is not built ({_load(name)[1]}); build it with: {_PROVIDERS[name].build}"


def _serves(provider: _Provider, kind: str) -> bool:
    interpreted = provider.interpreted and kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return not provider.devices or kind in provider.devices or interpreted


@cache
def _load(name: str) -> tuple[dict[str, Callable[..., Any]], str]:
    try:
        return _PROVIDERS[name].load(), ""
    except ImportError as error:
        return {}, str(error)


def _loaded(name: str) -> dict[str, Callable[..., Any]]:
    return _load(name)[0]


def describe(*tensors: Tensor) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)
