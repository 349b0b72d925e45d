"""Tables of the page on model files that people run, from bench.real."""

from __future__ import annotations

from docs.build.results import SETS, code, records, table
from specengine.benchmark.records import NOTHING, number
from specengine.benchmark.summaries import ALL, summaries as summarized

ENGINES = {"llama.cpp": "llama.cpp", "openvino": "OpenVINO GenAI"}
MODES = {"": "", "prompt-lookup": ", prompt lookup", "draft": ", the 0.5B as its draft"}


def real(file: str) -> str:
    """Return each way's rate over all prompts, over plain decoding's in all and by set, and tau."""
    by_way = {(r["way"], r["set"]): r for r in summarized(records(file))}
    sets = [name for way, name in by_way if way == "plain" and name != ALL]
    whole = [(way, r) for (way, name), r in by_way.items() if name == ALL]
    rows = []
    for way, r in sorted(whole, key=lambda item: item[1]["tokens_per_second"]):
        by_set = (number(by_way[way, name], "speed_total", 2) for name in sets)
        first = r["latency"]["first_token"][0] / 1e3 if "latency" in r else None
        rows.append(
            [
                method(way),
                f"{r['tokens_per_second']:.1f}",
                f"{r['speed_total']:.2f}",
                *by_set,
                number(r, "tau", 2),
                NOTHING if first is None else f"{first:.2f}",
                f"{r['prompts'] - r['diverging']} of {r['prompts']}",
            ]
        )
    names = (SETS.get(name, name) for name in sets)
    header = ("method", "tokens/s", "over plain", *names, "tau", "first token, s", "equal to plain")
    return table(header, rows, file)


def method(way: str) -> str:
    """Return what a page calls a way; a smaller model's file is called by its size."""
    if way.startswith("peer:"):
        engine, _, mode = way.removeprefix("peer:").partition("=")[0].partition("/")
        return ENGINES[engine] + MODES[mode]
    if way == "plain":
        return "plain decoding"
    draft, separator, policy = way.rpartition(":")
    if draft.endswith(".gguf"):
        return f"{code(policy)}, the 0.5B as its draft"
    return f"{code(policy)}, a trained head" if "/" in draft else code(draft + separator + policy)
