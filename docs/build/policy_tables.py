"""Tables of policies: their speed and trees, what they cost, and that no token depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.report import by_vocabulary
from docs.build.results import SETS, code, records, summaries, table
from specengine.benchmark.records import NOTHING, Record, number
from specengine.benchmark.summaries import ALL


def policies(file: str, *ways: str) -> str:
    """Return counters, the policy's share of time and speed, from bench.policies; of all methods if none is named.

    Columns without a figure are left out.
    """
    by_way = summaries(file)
    rows = []
    for way in ways or [way for way, name in by_way if name == ALL and way != "plain"]:
        whole = by_way[way, ALL]
        rows.append(
            [
                code(way),
                *(
                    number(whole, name, digits)
                    for name, digits in (("tau", 2), ("delta", 2), ("verified", 1))
                ),
                f"{100 * whole['policy_share']:.1f}" if "policy_share" in whole else NOTHING,
                number(whole, "speed_mean", 2),
            ]
        )
    header = (
        "policy",
        "tau",
        "delta",
        "nodes verified",
        "policy's share, %",
        "speed over plain",
    )
    columns = [column for column in zip(header, *rows, strict=True) if set(column[1:]) != {NOTHING}]
    shown = [list(row) for row in zip(*columns, strict=True)]
    return table(shown[0], shown[1:], file)


def sets(file: str, *ways: str) -> str:
    """Return the speed over plain decoding by set, mean of prompts, from bench.policies."""
    by_way = summaries(file)
    names = [name for name in SETS if ("plain", name) in by_way and name != ALL]
    rows = [
        [code(way), *(number(by_way[way, name], "speed_mean", 2) for name in names)]
        for way in ways or dict.fromkeys(way for way, _ in by_way if way != "plain")
    ]
    return table(("policy", *(SETS[name] for name in names)), rows, file)


def settings(*files_and_labels: str) -> str:
    """Return the speed over plain decoding over all sets; a file of bench.policies precedes its label."""
    files, labels = files_and_labels[::2], files_and_labels[1::2]
    by_file = {file: summaries(file) for file in files}
    ways = dict.fromkeys(way for file in files for way, _ in by_file[file] if way != "plain")
    rows = [
        [code(way), *(number(by_file[file].get((way, ALL), {}), "speed_mean", 2) for file in files)]
        for way in ways
    ]
    return table(("policy", *labels), rows, *files)


def adversarial(file: str) -> str:
    """Return cases of bench.adversarial, those of a kind in one row: medians of their rounds, and first rounds."""
    kinds: dict[str, list[Record]] = {}
    for r in records(file):
        if r["record"] == "row":
            kinds.setdefault(r["case"].rstrip("0123456789").rstrip(", "), []).append(r)
    rows = [
        [
            kind,
            ", ".join(f"{r['over_plain']:.2f}" for r in cases),
            ", ".join(f"{r['rounds'][0]:.2f}" for r in cases),
        ]
        for kind, cases in kinds.items()
    ]
    return table(("case", "speed over plain", "in the first round"), rows, file)


def chances(file: str) -> str:
    """Return expected calibration errors by source and sampling, from bench.chances."""
    by_source: dict[str, dict[str, Record]] = {}
    for r in records(file):
        if r["record"] == "chances":
            by_source.setdefault(r["source"], {})[r["sampling"]] = r
    samplings = list(dict.fromkeys(name for found in by_source.values() for name in found))
    rows = [
        [
            source,
            *(f"{found[name]['outcomes']:,}" for name in samplings),
            *(
                f"{found[name][f'{key}_error']:.3f}"
                for key in ("stated", "counted")
                for name in samplings
            ),
        ]
        for source, found in by_source.items()
    ]
    columns = [f"{key}, {name}" for key in ("outcomes", "stated", "counted") for name in samplings]
    return table(("source", *columns), rows, file)


def coupling(file: str) -> str:
    """Return sampled drafts with and without the sampler's noise, from bench.coupling."""
    by_case = {
        (r["sampling"], r["policy"], r["coupled"]): r
        for r in records(file)
        if r["record"] == "coupling"
    }
    policies = list(dict.fromkeys(policy for _, policy, _ in by_case if policy != "plain"))
    both = (True, False)
    rows = [
        [
            sampling,
            *(
                ", ".join(number(by_case[sampling, policy, knows], key, 2) for knows in both)
                for policy in policies
                for key in ("tau", "over_plain")
            ),
        ]
        for sampling in dict.fromkeys(sampling for sampling, _, _ in by_case)
    ]
    columns = [f"{code(policy)}: {key}" for policy in policies for key in ("tau", "speed")]
    return table(("sampling", *columns), rows, file)


def exactness(*files: str) -> str:
    """Return the verdicts over all answers of each file of bench.exactness."""
    rows = []
    for file in files:
        whole = next(r for r in records(file) if r["record"] == "summary")
        seeds = sorted(
            {
                "greedy" if r["seed"] is None else f"seed {r['seed']}"
                for r in records(file)
                if "seed" in r
            }
        )
        verdicts = [str(whole["verdicts"][name]) for name in ("exact", "near-tie", "mismatch")]
        rows.append(
            [
                whole["dtype"],
                ", ".join(seeds),
                str(whole["runs"]),
                f"{whole['tokens']:,}",
                *verdicts,
            ]
        )
    header = (
        "dtype",
        "decoding",
        "answers",
        "tokens",
        "equal",
        "differ at a near-tie",
        "mismatches",
    )
    return table(header, rows, *files)


def same(*files: str) -> str:
    """Return how many answers differ from plain decoding, over all policies of each file of bench.policies."""
    rows = []
    for file in files:
        settings = next(r for r in records(file) if r["record"] == "settings")
        whole = [r for (way, name), r in summaries(file).items() if name == ALL and way != "plain"]
        decoding = (
            f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
        )
        strict = "yes" if settings.get("strict") else ""
        counts = (
            str(len(whole)),
            str(sum(r["prompts"] for r in whole)),
            str(sum(r["diverging"] for r in whole)),
        )
        rows.append(
            [code(file.removesuffix(".jsonl")), settings["dtype"], decoding, strict, *counts]
        )
    header = (
        "file",
        "dtype",
        "decoding",
        "`strict`",
        "policies",
        "answers",
        "differ from plain decoding",
    )
    return table(header, rows, *files)


def verdicts(file: str, *newer: str) -> str:
    """Return the claims of the papers with what they come to and the verdict, from bench.papers.

    A claim of a newer file stands in the place of the same one.
    """
    settings = next(r for r in records(file) if r["record"] == "settings")
    files = (file, *newer)
    claims = {
        r["name"]: [r["paper"], r["claim"], r["published"], r["ours"], f"**{r['verdict']}**"]
        for each in files
        for r in records(each)
        if r["record"] == "claim"
    }
    header = ("paper", "claim", "published", "here", "verdict")
    claims_table = table(header, list(claims.values()), *files)
    return f"{settings['prompts']} prompts, {settings['logged']} tokens of each answer:\n\n{claims_table}"


def ablation(file: str, name: str, costs: str) -> str:
    """Return a set of rows of bench.papers: tau, nodes, and at a cost table the speed over the first row."""
    found = next(r for r in records(file) if r["record"] == "set" and r["set"] == name)
    rows = [
        [
            code(r["way"]),
            f"{r['tau'][0]:.2f}",
            number(r, "gamma", 1),
            "{:.2f} ({:.2f} to {:.2f})".format(*r["over_first"][costs]),
            r["verdict"][costs],
        ]
        for r in found["rows"]
    ]
    header = ("way", "tau", "nodes verified", f"over the first, {costs}", "verdict")
    return table(header, rows, file)


def learnt(file: str) -> str:
    """Return tokens per pass of a head alone before and after it has learnt from use, from research.use."""
    names = {**SETS, "german": "German", "others": "all others"}
    rows = [
        [
            str(names.get(r["set"], r["set"])),
            f"{r['before']:.2f}",
            f"{r['after']:.2f}",
            f"{r['gain']:+.1f} % ({r['interval'][0]:+.1f} to {r['interval'][1]:+.1f})",
        ]
        for r in records(file)
        if r["record"] == "acceptance" and r["way"] == "alone"
    ]
    return table(("text", "before", "after", "gain (95 % interval over prompts)"), rows, file)


def construction(file: str) -> str:
    """Return by parents how fast TALON's gate is over EAGLE's selection, from bench.tree_construction."""
    by_parents: dict[int, list[Record]] = {}
    for r in records(file):
        if r["record"] == "case":
            by_parents.setdefault(r["parents"], []).append(r["mean_ms"])
    rows = []
    for parents, cases in sorted(by_parents.items()):
        cells = []
        for backend in ("torch", "ops"):
            ratios = [times[f"eagle ({backend})"] / times[f"talon ({backend})"] for times in cases]
            cells += [
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}",
            ]
        rows.append([str(parents), *cells])
    header = ("parents", "in torch", "faster in", "as specengine's ops", "faster in")
    return table(header, rows, file)


def layers(file: str) -> str:
    """Return the time of each rule at the smallest and the largest vocabulary, and what ran the ops."""
    by_case = by_vocabulary(records(file))
    by_rule: dict[str, list[Sequence[str]]] = {}
    for row in by_case.rows:
        if row[1].endswith("(ops)"):
            by_rule.setdefault(row[1].removesuffix(" (ops)"), []).append(row)
    rows = [
        [rule, *map(_range, zip(*(row[2:] for row in cases), strict=True))]
        for rule, cases in by_rule.items()
    ]
    vocabularies = [row[0] for row in next(iter(by_rule.values()))]
    header = (
        "rule",
        f"ms at V of {_range(vocabularies)}",
        by_case.header[3],
        *(f"% {name}" for name in by_case.header[4:]),
    )
    return f"{by_case.title}:\n\n{table(header, rows, file)}"


def _range(cells: Sequence[str]) -> str:
    """Return the first cell to the last, without their unit."""
    return f"{cells[0].split()[0]} to {cells[-1].split()[0]}"


TABLES: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(policies, sets, settings, adversarial, chances, coupling),
        *(exactness, same, construction, layers, learnt, verdicts, ablation),
    )
}
