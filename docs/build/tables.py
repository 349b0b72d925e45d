"""Tables of the pages. Each names its result files below itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from docs.build.real import real
from docs.build.results import code, records, summaries, table
from specengine.benchmark.records import NOTHING, Record, number
from specengine.benchmark.summaries import ALL, summaries as summarized

WAYS = {  # as bench.cpu calls them
    "generate": "transformers' `generate`",
    "huggingface": "the model's own modules, specengine",
    "generate, prompt lookup": "transformers' prompt lookup",
    "huggingface prompt lookup": "transformers' prompt lookup",
    "plain": "specengine, plain decoding",
    "native": "specengine, bfloat16",
    "native int8": "specengine, int8",
    "native gguf": "specengine, from the packed GGUF file",
    "native int8, integer": "specengine, int8, integer numerics",
    "native gguf, integer": "specengine, from the packed GGUF file, integer numerics",
    "llama.cpp": "llama.cpp, plain decoding of the same GGUF file",
}
PEERS = {  # methods of specengine bench that are other engines
    "llama.cpp": "llama.cpp, plain decoding of the same GGUF file",
    "peer:llama.cpp": "llama.cpp, the same GGUF file",
    "peer:llama.cpp/prompt-lookup": "llama.cpp, prompt lookup",
    "peer:ik_llama.cpp": "ik_llama.cpp, the same GGUF file",
    "peer:openvino": "OpenVINO GenAI, the same GGUF file",
    "peer:openvino/prompt-lookup": "OpenVINO GenAI, prompt lookup",
    "peer:vllm": "vLLM, bfloat16",
    "peer:vllm/ngram": "vLLM, n-gram drafts",
    "peer:vllm/eagle3": "vLLM, EAGLE-3 with our head",
    "peer:onnxruntime": "onnxruntime-genai, int4",
}
BENCHED = {  # methods of specengine bench other than policies
    "generate": "transformers' `generate`",
    "generate-compiled": "transformers' `generate`, compiled",
    "prompt-lookup": "transformers' prompt lookup",
    **PEERS,
    "plain": "specengine, plain decoding",
}
ENGINES = {"llama_cpp": "llama.cpp", "ik_llama_cpp": "ik_llama.cpp", "openvino": "OpenVINO"}


def versus(file: str) -> str:
    """Return the table of specengine bench: each method over all prompts."""
    whole = benched(file)
    rows = [
        [
            BENCHED.get(way, f"specengine, {code(way)}"),
            f"{r['tokens_per_second']:.0f}",
            f"{over_generate(whole, way):.2f}",
            f"{r['speed_total']:.2f}",
            f"{r['prompts'] - r['diverging']} of {r['prompts']}",
        ]
        for way, r in sorted(whole.items(), key=lambda item: item[1]["tokens_per_second"])
    ]
    return table(
        ("method", "tokens/s", "over `generate`", "over plain decoding", "answers equal to plain"),
        rows,
        file,
    )


def engines(file: str) -> str:
    """Return the table of specengine bench with the spread over prompts, and ways that did not run with the reason."""
    rows = []
    whole = benched(file)
    for way, r in sorted(whole.items(), key=lambda item: item[1]["tokens_per_second"]):
        low, median, high = r["speed_quartiles"]
        auto = whole["auto"]["tokens_per_second"] / r["tokens_per_second"]
        rows.append(
            [
                BENCHED.get(way, f"specengine, {code(way)}"),
                f"{r['tokens_per_second']:.0f}",
                f"{auto:.2f}",
                f"{median:.2f} ({low:.2f} to {high:.2f})",
                f"{r['prompts'] - r['diverging']} of {r['prompts']}",
            ]
        )
    rows += [
        [BENCHED.get(r["way"], code(r["way"])), f"not run: {r['reason']}", *[NOTHING] * 3]
        for r in records(file)
        if r["record"] == "not run"
    ]
    header = (
        "method",
        "tokens/s",
        "`auto` over it",
        "over plain: median (quartiles)",
        "equal to plain",
    )
    return table(header, rows, file)


def headline(tiled: str, untiled: str) -> str:
    """Return the headline: the default over `generate`, plain decoding and the best peer, with AMX and without."""
    with_amx, without = (_gains(file) for file in (tiled, untiled))
    return (
        f"**{with_amx.over_generate:.1f}x** the tokens per second of transformers' `generate` on two CPU cores with "
        f"AMX,\nand {with_amx.over_plain:.1f}x those of plain decoding. Without AMX it is {without.over_generate:.1f}x "
        f"and {without.over_plain:.2f}x, and {without.over_peer:.1f}x the best\nof the other engines. The output "
        "equals plain decoding, token for token ([measured](#measured))."
    )


MACHINES = (
    "135M, Intel Xeon with AMX",
    "135M, AMD EPYC without AMX",
    "0.5B in Q4_K_M, the AMD",
    "1.5B in Q4_K_M, the AMD",
)


def machines(*files: str) -> str:
    """Return the default beside the others on each of MACHINES, by a file of each."""
    rows = []
    for file, machine in zip(files, MACHINES, strict=True):
        found, best = _gains(file), benched(file)["auto"]
        rows.append(
            [
                machine,
                f"{best['tokens_per_second']:.0f}",
                f"{found.over_plain:.2f}",
                NOTHING if found.over_generate is None else f"{found.over_generate:.2f}",
                f"{found.over_peer:.2f} ({found.peer})",
                f"{best['prompts'] - best['diverging']} of {best['prompts']}",
            ]
        )
    header = (
        "model, two cores",
        "tokens/s",
        "over plain decoding",
        "over `generate`",
        "over the best peer",
        "equal to plain",
    )
    return table(header, rows, *files)


class _Gains(NamedTuple):
    over_plain: float
    over_generate: float | None
    over_peer: float
    peer: str


def _gains(file: str) -> _Gains:
    """Return the speed of the default over others, over all prompts of specengine bench."""
    rates = {way: r["tokens_per_second"] for way, r in benched(file).items()}
    peer = max((way for way in rates if way in PEERS), key=lambda way: rates[way])
    own = rates["auto"]
    generate = own / rates["generate"] if "generate" in rates else None
    return _Gains(
        own / rates["plain"],
        generate,
        own / rates[peer],
        PEERS[peer].removesuffix(", the same GGUF file").partition(", plain")[0],
    )


def over_generate(whole: dict[str, Record], way: str) -> float:
    return whole[way]["tokens_per_second"] / whole["generate"]["tokens_per_second"]


def benched(file: str) -> dict[str, Record]:
    """Return the summaries of specengine bench over all sets, by method."""
    return {r["way"]: r for r in summarized(records(file)) if r["set"] == ALL}


BY_MACHINE = {
    "auto": "the default: grows the tree by measured costs and counted acceptance; falls back to plain decoding",
    "salf/cpu": "SALF: best-first search, stopped once the next batch holds too little probability",
    "talon/cpu": "TALON: a node budget, gated by the level's best path: deep where the draft is sure, wide where not",
    "ltd,networks=cpu": "Learning to Draft: two networks choose depth and size, trained on throughput",
    "dynatree/cpu": "DynaTree: one to three children by the draft's confidence, depth by path probability",
    "eagle/cpu": "EAGLE-2: a beam, then the best of all scored nodes",
    "cast": "CAST: EAGLE-2's beam and rerank; width, depth and nodes follow from measured costs",
}


def by_machine(file: str, second: str) -> str:
    """Return policies with a description and their speed over plain decoding, from bench.policies on two machines."""
    machines = summaries(file), summaries(second)
    rows = [
        [
            code(way),
            text,
            *(number(by_way.get((way, ALL), {}), "speed_mean", 2) for by_way in machines),
        ]
        for way, text in BY_MACHINE.items()
    ]
    return table(("policy", "the tree", "with AMX", "without"), rows, file, second)


def forward(file: str) -> str:
    """Return milliseconds of one forward by number of rows, from bench.cpu."""
    ways = [r for r in records(file) if r["record"] == "forward"]
    counts = list(ways[0]["ms"])
    rows = [
        [_forward(r["way"]), *(f"{r['ms'][count]:.1f}" for count in counts), f"{r['read_ms']:.1f}"]
        for r in ways
    ]
    return table(
        ("weights", *(f"{_rows(n)}, ms" for n in counts), "one read of the weights, ms"), rows, file
    )


def _rows(count: str) -> str:
    return f"{count} row" if int(count) == 1 else f"{count} rows"


def _forward(way: str) -> str:
    names = {
        "native": "bfloat16",
        "native int8": "int8",
        "native gguf": "packed GGUF",
        "default": "default",
    }
    return names.get(way, "bfloat16, transformers' modules")


def rows(*files: str) -> str:
    """Return what rows cost in every engine, from bench.cpu.rows."""
    found = [
        (file, r)
        for file in files
        for r in records(file)
        if r["record"] == "rows" and r["engine"] != "reading"
    ]
    counts = [count for count in found[0][1]["ms"] if count not in ("1", "2", "32")]
    body = [
        [
            *(
                [next(s["file"] for s in records(file) if s["record"] == "settings")]
                if len(files) > 1
                else []
            ),
            _engine(r),
            f"{r['ms']['1']:.1f}",
            f"{r['over_reading']:.2f}",
            *(f"{r['over_1_row'][count]:.2f}" for count in counts),
        ]
        for file, r in found
    ]
    header = ("engine", "1 row, ms", "1 row / one read", *(f"{_rows(n)} / 1" for n in counts))
    return table(("file", *header) if len(files) > 1 else header, body, *files)


def _engine(record: Record) -> str:
    if "backend" not in record:
        return ENGINES.get(label := str(record["label"]), label)
    instructions, numerics, *_ = record["backend"].partition("(")[2].split(", ")
    return f"specengine, {numerics}, {code(instructions)}"


def first_tokens(file: str) -> str:
    """Return seconds to the first token by length of the prompt, from bench.cpu.peers."""
    found = [r for r in records(file) if r["record"] == "first token"]
    counts = [f"{r['prompt_tokens']} tokens, s" for r in found]
    body = [
        [_peer(way), *(f"{r['seconds'][way]:.2f}" for r in found)] for way in found[0]["seconds"]
    ]
    return table(("engine", *counts), body, file)


def _peer(way: str) -> str:
    engine, _, kind = way.partition(", ")
    return f"{ENGINES.get(engine, engine)}, {kind}"


def start(file: str) -> str:
    """Return seconds to the first token of a process, and its memory, from bench.cpu."""
    memory = {r["way"]: r for r in records(file) if r["record"] == "memory"}
    seconds = {r["way"]: r for r in records(file) if r["record"] == "start"}
    rows = [
        [
            _forward(way),
            number(seconds.get(way, {}), "cold_s", 1),
            number(seconds.get(way, {}), "warm_s", 1),
            number(memory.get(way, {}), "peak_mb", 0),
        ]
        for way in dict.fromkeys([*seconds, *memory])
    ]
    header = (
        "weights",
        "first token, nothing cached, s",
        "first token, cached, s",
        "peak MB beyond imports and tokenizer",
    )
    return table(header, rows, file)


def perplexity(file: str) -> str:
    """Return perplexities, and how far a token's log-likelihood is from float32's, from bench.perplexity."""
    body = []
    for r in records(file):
        if r["record"] == "perplexity":
            far, over = r.get("nats_from_float32", {}), r["over"].get("huggingface float32")
            rise = (
                "–"
                if over is None
                else f"{100 * (over - 1):.2f} ± {100 * r['over_error']['huggingface float32']:.2f}"
            )
            body.append(
                [
                    _way(r["way"]),
                    f"{r['perplexity']:.3f}",
                    rise,
                    number(far, "mean", 3),
                    number(far, "max", 2),
                ]
            )
    header = [
        "weights",
        "perplexity",
        "over float32, %",
        "nats from float32, mean",
        "largest difference",
    ]
    if all(row[2] == "–" for row in body):  # files of before that was recorded
        body, header = [[*row[:2], *row[3:]] for row in body], [*header[:2], *header[3:]]
    return table(header, body, file)


def perplexity_kinds(file: str) -> str:
    """Return by how much perplexities of packed files rise when activations are rounded, from bench.perplexity."""
    found = [r for r in records(file) if r["record"] == "perplexity"]
    base = "native gguf"
    body = []
    for name in dict.fromkeys(r["file"] for r in found):
        of_file = {r["way"]: r for r in found if r["file"] == name}
        rises = [
            f"{100 * (r['over'][base] - 1):+.2f} ± {100 * r['over_error'][base]:.2f}"
            for r in (of_file["native gguf, integer"], of_file["llama.cpp"])
        ]
        body.append([code(name), f"{of_file[base]['perplexity']:.2f}", *rises])
    return table(
        ("file", "perplexity, bfloat16", "integer over it, %", "llama.cpp over it, %"),
        body,
        file,
    )


def _way(way: str) -> str:
    names = {
        "huggingface float32": "float32, transformers' modules",
        "native int8, integer": "int8, integer numerics",
        "native gguf, integer": "packed GGUF, integer numerics",
        "llama.cpp": "packed GGUF, llama.cpp",
    }
    return names.get(way) or _forward(way)


def mtp(file: str) -> str:
    """Return trees and the best chain of an MTP head at published rates, from bench.mtp."""
    found = [r for r in records(file) if r["record"] == "mtp replay"]
    worlds: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for r in sorted(found, key=lambda r: float(r["spread"])):
        ways = worlds.setdefault((r["costs"], r["rates"]), {})
        ways.setdefault(r["way"], []).append(r)
    body = []
    for (costs, rates), ways in worlds.items():
        chains = [records for way, records in ways.items() if way.startswith("chain")]
        best = [max(same, key=lambda r: r["speedup"]) for same in zip(*chains, strict=True)]
        cells = [
            [f"{r['speedup']:.2f}" for r in ways["chain,length=1"]],
            [f"{r['speedup']:.2f} ({r['way'].rpartition('=')[2]})" for r in best],
            [f"{r['speedup']:.2f}" for r in ways["auto"]],
            [f"{r['gamma']:.1f}" for r in ways["auto"]],
        ]
        body.append([costs, rates, *map(", ".join, cells)])
    header = ("costs", "rates", "1 token", "best chain (tokens)", "`auto`", "its nodes")
    return table(header, body, file)


def published(file: str) -> str:
    """Return the speed of `auto` under each published cost curve, next to LTD and the best other setting."""
    by_way = {r["way"]: r for r in records(file) if r["record"] == "replay"}
    rows = []
    for curve in next(iter(by_way.values()))["speedup"]:

        def speed(way: str, curve: str = curve) -> float:
            return float(by_way[way]["speedup"][curve])

        own = [way for way in by_way if way.startswith(f"auto,costs={curve},")]
        others = [way for way in by_way if not way.startswith(("auto", "ltd"))]
        small = max((way for way in others if by_way[way]["gamma"] <= 61), key=speed)
        best = [f"{speed(way):.3f} ({code(way)})" for way in (small, max(others, key=speed))]
        few, many = (
            max((way for way in own if f"budget={cap}," in way), key=speed) for cap in (60, 240)
        )
        rows.append(
            [
                curve,
                f"{speed(few):.3f}",
                best[0],
                f"{speed(many):.3f}",
                f"{speed('ltd/paper'):.3f}",
                best[1],
            ]
        )
    header = (
        "costs",
        "auto, 60 nodes",
        "best other, 60",
        "auto, 240 nodes",
        "ltd/paper (120)",
        "best other, 240",
    )
    return table(header, rows, file)


def compared(*files: str) -> str:
    """Return the speed of each method of research.ltd over plain decoding and over grid search, by file."""
    replays = [{r["way"]: r for r in records(file) if r["record"] == "replay"} for file in files]
    columns = ("speed", "over grid search")
    rows = [
        [code(way), *itertools.chain(*(_compared(by_way.get(way)) for by_way in replays))]
        for way in dict.fromkeys(way for by_way in replays for way in by_way)
    ]
    header = [f"{code(file.removesuffix('.jsonl'))}, {what}" for file in files for what in columns]
    return table(("method", *header), rows, *files)


def _compared(row: Record | None) -> list[str]:
    if row is None:
        return [NOTHING] * 2
    grid = "{:.2f} ({:.2f} to {:.2f})".format(*row["over_grid"])
    return [number(row, "speed", 3), grid]


def model_shapes(*files: str) -> str:
    """Return the cost of rows at shapes of published models, and the experts that they read, from bench.cpu.shapes."""
    rows = []
    for r in (r for file in files for r in records(file) if r["record"] == "shape"):
        read, there = r.get("experts_of_layers_run", {}), r.get("experts_there")
        rows.append(
            [
                r["shape"],
                r["kind"],
                f"{r['layers_run']} of {r['layers']}",
                f"{r['verify_ms_by_nodes']['1']:.0f}",
                *(f"{r['over_1_row'][n]:.2f}" for n in ("2", "4", "8", "16")),
                f"{read['1']}, {read['8']} of {there}" if there else "",
            ]
        )
    costs = (f"{n} rows / 1" for n in (2, 4, 8, 16))
    return table(
        ("shape", "weights", "layers run", "1 row, ms", *costs, "experts read by 1, 8 rows"),
        rows,
        *files,
    )


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(headline, machines, engines, by_machine, versus),
        *(forward, rows, first_tokens, start, perplexity, perplexity_kinds),
        *(published, mtp, compared, model_shapes),
        real,
    )
}
