"""specengine check: is speculative decoding's answer the target's own?"""

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from specengine import policies
from specengine.checking import Certificate, certify, huggingface_tokens
from specengine.cli import given
from specengine.cli.terminal import Progress, as_json, say
from specengine.engine import Engine
from specengine.errors import require, require_input
from specengine.files import writing

VERDICTS = ("exact", "near-tie", "mismatch")
PROMPTS = (
    "Repeat this sentence three times: The harbour opens at six and the first boats bring herring to the market.",
    "Name the planets of the solar system and say one thing about each.",
    "Write a Python function that returns the n-th Fibonacci number, then explain it line by line.",
    "Translate to French: I would like a table by the window for two people, please.",
)


def run(arguments: argparse.Namespace) -> int:
    conversations = _conversations(arguments)
    options = given.generation_options(arguments)
    # one for the reference and for all policies
    options.setdefault("seed", int(torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")))
    plain, speculative = _engines(arguments)
    given.note_idle_options(arguments, plain.stream(conversations[0][0], **options))
    rows = list(_compare(arguments, plain, speculative, conversations, options))
    counts = Counter(row["verdict"] for row in rows)
    summary = {verdict: counts[verdict] for verdict in VERDICTS}
    report = {"against": arguments.against, "seed": options["seed"], **summary, "comparisons": rows}
    if arguments.out is not None:
        with writing(arguments.out):
            arguments.out.write_text(as_json(report, "utf-8") + "\n", encoding="utf-8")
    print(
        as_json(report)
        if arguments.json
        else ", ".join(f"{count} {verdict}" for verdict, count in summary.items())
    )
    return 1 if summary["mismatch"] else 0


def _engines(arguments: argparse.Namespace) -> tuple[Engine, dict[str, Engine]]:
    """Return the plain engine and one per policy. They take turns, so they share one target and one draft."""
    names: list[str | None] = list(dict.fromkeys(arguments.policy or [None]))
    require_input(
        "policy_option: give it with one --policy, or run once per policy",
        len(names) == 1 or not arguments.policy_option,
    )
    drafting = [name for name in names if name != "plain"]
    shapes = {name: policies.make(name) for name in drafting[1:] if name is not None}
    loaded = drafting[0] if drafting else "plain"
    first = Engine.from_pretrained(
        arguments.model, arguments.draft, loaded, **given.load_options(arguments)
    )
    plain = Engine(first.target, None, None, first.tokenizer)
    engines = {}
    for name in names:
        if name == loaded:
            engines[name or "default"] = first
        elif name in shapes and first.drafter is not None:
            engines[name] = Engine(first.target, first.drafter, shapes[name], first.tokenizer)
        else:
            engines[str(name)] = plain
    return plain, engines


def _compare(
    arguments: argparse.Namespace,
    plain: Engine,
    speculative: dict[str, Engine],
    conversations: list[given.Turns],
    options: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Say and yield a row per policy and turn. Later turns continue from the plain answers."""
    width = max(map(len, ("policy", *speculative)))
    say(_row("policy".ljust(width), "verdict", "token", "gap", "length", "tau", "prompt"))
    progress = Progress(sum(map(len, conversations)) * (1 + len(speculative)))
    for turns in conversations:
        messages = given.messages(arguments)
        for turn in turns:
            prompt = given.as_prompt(messages, turn, raw=arguments.raw)
            with progress.step(f"plain decoding of {_short(turn)!r}"):
                expected = plain.generate(prompt, **options)
                reference = expected.token_ids
                if arguments.against == "huggingface":
                    reference = huggingface_tokens(plain, prompt, **options)
            for name, engine in speculative.items():
                with progress.step(f"policy {name} on {_short(turn)!r}"):
                    report = certify(
                        plain,
                        engine,
                        prompt,
                        reference=reference,
                        tolerance=arguments.tolerance,
                        **options,
                    )
                say(_line(name.ljust(width), turn, report))
                yield {"policy": name, "prompt": turn, **report.to_dict()}
            messages += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": expected.text},
            ]


def _line(policy: str, prompt: str, report: Certificate) -> str:
    position = "-" if report.position is None else str(report.position)
    gap = "-" if report.gap is None else f"{report.gap:.4f}"
    answer = report.answer
    return _row(
        policy,
        report.verdict,
        position,
        gap,
        str(len(answer.token_ids)),
        f"{answer.stats.mean_acceptance_length:.2f}",
        _short(prompt),
    )


def _short(prompt: str) -> str:
    return " ".join(prompt.split())[:50]


def _row(
    policy: str, verdict: str, position: str, gap: str, length: str, tau: str, prompt: str
) -> str:
    return f"{policy} {verdict:<9} {position:>5} {gap:>8} {length:>6} {tau:>5}  {prompt}"


# ---- prompts


def _conversations(arguments: argparse.Namespace) -> list[given.Turns]:
    require_input(
        "prompts: give prompts or a file of them, not both",
        not (arguments.prompt and arguments.prompts),
    )
    require("limit", arguments.limit, "1 or more", arguments.limit is None or arguments.limit >= 1)
    found = (
        given.read_prompts(arguments.prompts)
        if arguments.prompts
        else ([text] for text in arguments.prompt or PROMPTS)
    )
    conversations = list(islice(found, arguments.limit))
    require_input(f"prompts: {arguments.prompts} has no prompts", bool(conversations))
    return conversations
