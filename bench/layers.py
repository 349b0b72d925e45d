"""python -m bench.layers --out FILE: a target's decoder layers as the model's modules, fused, and with merged products.

Needs a CUDA device. A model of random weights in the shape of Llama-3.1-8B, of two depths: a layer is their difference.
Forwards of tree rows are replayed as CUDA graphs, prompts run eagerly. Each row of the result has the kernels of a
layer as the profiler counts them, its microseconds, and those of the whole forward.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from transformers import LlamaConfig, LlamaForCausalLM

from bench.provenance import Record, show
from specengine import ops
from specengine.models import fused
from specengine.models.huggingface import CausalLM
from specengine.models.kv_cache import KVCache, Rows

WAYS: dict[str, tuple[tuple[str, ...], bool]] = {
    "modules": ((), False),
    "fused": (("cuda",), False),
    "merged": (("cuda",), True),
}
ROWS, CONTEXT, PROMPT = (1, 16, 64), 1024, 1024
DEPTHS = (4, 12)
REPLAYS, WARM_UPS = 50, 3


def model_of(layers: int, kind: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with torch.device("cuda"):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(kind).eval()


def siblings(cache: KVCache, count: int) -> Rows:
    """Return rows that see the cache and themselves."""
    device, filled = cache.filled.device, cache.filled
    tokens = torch.arange(count, device=device, dtype=torch.int64) * 13
    live = torch.full_like(filled, count)
    return Rows(
        tokens,
        torch.full_like(tokens, CONTEXT),
        ops.own_bits(count, device),
        filled.long(),
        filled,
        live,
    )


def microseconds(run: Callable[[], Any]) -> float:
    for _ in range(WARM_UPS):
        run()
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found)


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def kernels(run: Callable[[], Any]) -> int:
    run()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events())


def prompted(lm: CausalLM, cache: KVCache) -> None:
    cache.length = 0
    lm.extend(cache, list(range(PROMPT)))


def measured(way: str, layers: int, kind: torch.dtype) -> dict[str, tuple[int, float]]:
    """Return kernels and microseconds of a whole forward, by what is run."""
    fused.DEVICES, merge = WAYS[way]
    lm = CausalLM(model_of(layers, kind), merge=merge)
    assert lm.modules.startswith("fused") is (way != "modules"), lm.layers_note
    found = {}
    with torch.inference_mode():
        cache = lm.new_cache(CONTEXT + max(ROWS))
        cache.slab.normal_()
        for count in ROWS:
            cache.length = CONTEXT
            run: Callable[[], Any] = partial(lm.forward, siblings(cache, count), cache)
            found[f"{count} rows"] = kernels(run), microseconds(captured(run).replay)
        run = partial(prompted, lm, cache)
        found[f"a prompt of {PROMPT}"] = kernels(run), microseconds(run)
    return found


def records(kind: torch.dtype) -> Iterator[Record]:
    for way in WAYS:
        few, many = (measured(way, layers, kind) for layers in DEPTHS)
        more = DEPTHS[1] - DEPTHS[0]
        for what, (count, time) in many.items():
            yield {
                "record": "layers",
                "way": way,
                "forward": what,
                "dtype": str(kind).removeprefix("torch."),
                "layers": DEPTHS[1],
                **(
                    {"kernels of a layer": (count - few[what][0]) / more} if count else {}
                ),  # the profiler saw some
                "us of a layer": round((time - few[what][1]) / more, 2),
                "us": round(time, 1),
            }
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="result file, JSON lines")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    given = parser.parse_args()
    show(records(getattr(torch, given.dtype)), given.out)


if __name__ == "__main__":
    main()
