"""A plugin of SGLang: its EAGLE worker drafts, a policy of specengine chooses which drafted tokens are verified.

SGLang loads it by its entry point. `--speculative-algorithm SPECENGINE` turns it on, and the environment says which
policy: SPECENGINE_POLICY=talon/cpu, SPECENGINE_POLICY_OPTIONS="mu=0.05 width=4".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from specengine_sglang.selection import chosen_policy, organize

NAME = "SPECENGINE"
ORGANIZE = "sglang.srt.speculative.eagle_utils.organize_draft_results"


def register() -> None:
    """Tell SGLang of the algorithm, and of the function that is put around its choice of nodes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from specengine_sglang.algorithm import PolicyAlgorithm

    options = {
        "supports_overlap": True,
        "validate_server_args": _validate,
        "spec_class": PolicyAlgorithm,
    }
    SpeculativeAlgorithm.register(NAME, **options)(_worker)
    HookRegistry.register(ORGANIZE, _organize, HookType.AROUND)


def _worker(_server_args: Any) -> type:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    return EAGLEWorkerV2


def _validate(server_args: Any) -> None:
    _policy()
    if (server_args.speculative_eagle_topk or 0) < 2:
        raise ValueError(
            "--speculative-eagle-topk: 2 or more is needed, a chain leaves nothing to choose"
        )


def _organize(original: Callable[..., Any], *given: Any) -> Any:
    from sglang.srt.runtime_context import get_spec

    if (get_spec().speculative_algorithm or "").upper() != NAME:
        return original(*given)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a policy runs on the host, which no CUDA graph holds: start with --disable-cuda-graph"
        )
    return organize(_policy(), *given)


@cache
def _policy() -> Any:
    return chosen_policy(
        os.environ.get("SPECENGINE_POLICY", "talon"),
        os.environ.get("SPECENGINE_POLICY_OPTIONS", ""),
    )
