"""Plain decoding and policies with and without CUDA graphs, compared with transformers' own decoding.

Ways: transformers' `generate`, the same with a static cache (which transformers compiles on a CUDA device), plain
decoding here, and each policy, the last two eagerly and as graphs. On a CUDA device all policies take part. A way that
is refused or fails is listed with the reason, and the others go on.

Ways are measured as `specengine bench` does, but for that one engine of each way answers in all rounds. Answers are
greedy; those that differ from plain decoding's are counted, as half precision may flip near-ties. With --strict plain
decoding and the policies also run with strict verification, where none may differ from strict plain decoding. On a CUDA
device the profiler counts, over one more answer of each way, how often the host waited for the device.
`python -m bench.report` makes tables of the file.

    python -m bench.graphs --device cuda --out FILE
    python -m research.inflate --shape 8b --out build/8b && python -m bench.graphs --device cuda --model build/8b \\
        --draft build/8b/head --out FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from bench import provenance, report, workloads
from bench.arguments import add_arguments
from specengine import Engine, checkpoints as models, ops, policies
from specengine.benchmark.measuring import Run, tokens_of
from specengine.benchmark.records import Record
from specengine.benchmark.summaries import ALL, summaries
from specengine.benchmark.ways import PLAIN, EngineDecoder, Generate, Way, WayDecoder
from specengine.benchmark.workloads import Workload
from specengine.drafters.eagle import EagleDraft
from specengine.engine import loading
from specengine.errors import InputError
from specengine.models.huggingface import HuggingFaceTarget
from specengine.options import LoadOptions

POLICIES = ("eagle", "talon", "salf", "chain")
GREEDY = {"temperature": 0.0}
GRAPHS, STRICT = "graphs", "graphs, strict"


class Decoders:
    """Decoders by name, created once, from one model and another one for transformers.

    On a device the first engine loads it and the others share it: so layers are merged and nothing looks for changed
    weights, as where a user loads by name.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._draft, self._device, self._dtype = args.draft, args.device, getattr(torch, args.dtype)
        self._path = models.resolve(args.model)
        self._model: Any = self._loaded() if args.device == "cpu" else self._path
        self.made: dict[str, WayDecoder] = {}
        place = {} if args.device == "cpu" else {"dtype": self._dtype, "device": self._device}
        self.plain = Engine.from_pretrained(self._model, None, PLAIN, graphs=False, **place)

    def _loaded(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            self._path, dtype=self._dtype, trust_remote_code=False
        ).to(self._device)

    @cached_property
    def _untouched(self) -> Any:
        return self._loaded()

    def transformers(self, name: str, **options: Any) -> Way:
        return self._way(name, lambda: Generate(self._untouched, GREEDY, [], **options), ours=False)

    def ours(self, policy: str, driven: str = "") -> Way:
        """Return the method of a policy. driven: GRAPHS, STRICT, or eager."""
        name = f"{policy}, {driven}" if driven else policy
        options: dict[str, Any] = (
            {"graphs": True, "strict": True} if driven == STRICT else {"graphs": driven == GRAPHS}
        )
        against = f"{PLAIN}, {STRICT}" if driven == STRICT else PLAIN

        def make() -> EngineDecoder:
            return EngineDecoder(
                self.plain if name == PLAIN else self._engine(policy, **options), GREEDY
            )

        return self._way(name, make, against=against)

    def _way(self, name: str, make: Callable[[], WayDecoder], **options: Any) -> Way:
        def start() -> WayDecoder:
            if name not in self.made:
                self.made[name] = make()
            return self.made[name]

        return Way(name, start, facts={"places": [(report.POLICIES, "")]}, **options)

    def _engine(self, policy: str, **options: Any) -> Engine:
        draft = None if policy == PLAIN else self._draft
        if policy != PLAIN and not options.get("graphs"):
            options["lookup"] = False
        if isinstance(self.plain.target, HuggingFaceTarget):
            engine = beside(self.plain, draft, policy, LoadOptions.of(options))
        else:
            engine = Engine.from_pretrained(self._model, draft, policy, **options)
        share_head(
            engine, [made.engine for made in self.made.values() if isinstance(made, EngineDecoder)]
        )
        return engine


def beside(first: Engine, draft: Any, policy: str, options: LoadOptions) -> Engine:
    """Return an engine with the weights of the first one's target and caches of its own."""
    lm = cast(HuggingFaceTarget, first.target).lm
    shared = type("Shared", (HuggingFaceTarget,), {"makes": staticmethod(lambda *_, **__: lm)})
    target = shared(lm.model, captured=bool(options.graphs), strict=options.strict)
    if policy == PLAIN:
        return Engine(target, None, None, first.tokenizer)
    drafter = loading.draft_for(target, first.tokenizer, draft, options)
    return Engine(target, drafter, policies.make(policy), first.tokenizer)


def share_head(engine: Engine, others: list[Engine]) -> None:
    """Share one copy of the head's weights between all engines on a device. For an 8B model it has 0.75 GB."""
    if (
        not isinstance(engine.drafter, EagleDraft) or engine.target.device.type == "cpu"
    ):  # there weights are packed
        return
    first = next(
        (other.drafter for other in others if isinstance(other.drafter, EagleDraft)), engine.drafter
    )
    for head, known in zip(engine.drafter.weights, first.weights, strict=True):
        for own, shared in zip(head.parameters(), known.parameters(), strict=True):
            own.data = shared.data


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.graphs", description=__doc__.splitlines()[0]
    )
    add_arguments(
        parser,
        "model",
        "draft",
        "prompts",
        "per_set",
        "max_new_tokens",
        "rounds",
        "dtype",
        "device",
        "out",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help=f"repeatable; default: all on a CUDA device, elsewhere {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--strict", action="store_true", help="also run graphs with strict verification"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="WAY", help="repeatable: leave this way out"
    )
    parser.add_argument("--ours", action="store_true", help="leave out transformers' own decoding")
    args = parser.parse_args(arguments)
    for policy in args.policy or ():
        policies.make(policy)  # what is asked for by a wrong name is refused at once
    records = provenance.show(_records(args), args.out)
    for table in report.tables(records):
        print(table.markdown(), end="\n\n")
    return int(any(record.get("fault") for record in records))


def _records(args: argparse.Namespace) -> Iterator[Record]:
    items = workloads.read(args.prompts, args.per_set)
    yield _settings(args, items)
    decoders = Decoders(args)
    run = Run(
        decoders.plain,
        ways(args, decoders),
        GREEDY,
        length=args.max_new_tokens,
        rounds=args.rounds,
        say=_say,
    )
    measured = []
    for record in run.records(items):
        if record["record"] != "answer":
            measured.append(record)
            yield record
    lost = {record["way"] for record in measured if record["record"] == "not run"}
    found = summaries(measured)
    rates = {record["way"]: record["tokens_per_second"] for record in found if record["set"] == ALL}
    yield from (record | _beside(record, rates) for record in found)
    prompt = tokens_of(decoders.plain, items[0].text)
    del run  # which holds the decoders as well
    for name in [name for name in decoders.made if name not in lost]:
        yield from _last_looks(name, decoders.made.pop(name), prompt, args)


def ways(args: argparse.Namespace, decoders: Decoders) -> list[Way]:
    theirs = [
        decoders.transformers("transformers"),
        decoders.transformers("transformers, static cache", cache_implementation="static"),
    ]
    found = [decoders.ours(PLAIN), *([] if args.ours else theirs), decoders.ours(PLAIN, GRAPHS)]
    found += [
        decoders.ours(policy, driven) for policy in _policies(args) for driven in ("", GRAPHS)
    ]
    found += [decoders.ours(policy, STRICT) for policy in (PLAIN, *_policies(args)) if args.strict]
    names = [way.name for way in found]
    if unknown := [name for name in args.skip if name not in names or name == PLAIN]:
        raise InputError(
            f"skip: got {unknown[0]!r}, accepted {', '.join(name for name in names if name != PLAIN)}"
        )
    return [way for way in found if way.name not in args.skip]


def _policies(args: argparse.Namespace) -> list[str]:
    if args.policy or not args.device.startswith("cuda"):
        return args.policy or list(POLICIES)
    return [*POLICIES, *(name for name in policies.names() if name not in (*POLICIES, PLAIN))]


def _beside(summary: Record, rates: dict[str, float]) -> Record:
    """Return the speed over transformers and over captured plain decoding, of a summary over all sets."""
    others = {"over_transformers": "transformers", "over_captured_plain": f"{PLAIN}, {GRAPHS}"}
    known = {
        name: rates[way] for name, way in others.items() if way in rates and summary["set"] == ALL
    }
    return {name: round(summary["tokens_per_second"] / rate, 3) for name, rate in known.items()}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _last_looks(
    name: str, decode: WayDecoder, prompt: list[int], args: argparse.Namespace
) -> Iterator[Record]:
    """Yield how often a way's host waits, and what its graphs hold; it is given up then, with the memory it holds."""
    if args.device != "cpu":
        answer = partial(decode, prompt, args.max_new_tokens)
        yield {
            "record": "host waits",
            "way": name,
            **_or_reason(lambda: {"calls": _host_waits(answer)}),
        }
    if isinstance(decode, EngineDecoder) and f", {GRAPHS}" in name:
        yield {
            "record": "captures",
            "way": name,
            **_or_reason(lambda: asdict(decode.engine.warmup(1024))),
        }


def _or_reason(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Record a failure as an entry, so that earlier measurements are not lost."""
    try:
        return function()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


WAITING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def _host_waits(answer: Callable[[], Any]) -> dict[str, int]:
    """Return how often each blocking call of the CUDA runtime was made during one answer.

    The profiler itself waits for the device at its start and its end: as often as where nothing is asked.
    """
    own = _waits_within(lambda: None)
    calls = _waits_within(answer)
    return {
        name: count - own.get(name, 0) for name, count in calls.items() if count > own.get(name, 0)
    }


def _waits_within(function: Callable[[], Any]) -> dict[str, int]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()  # what is still under way belongs to it
    return {event.key: event.count for event in profile.key_averages() if event.key in WAITING}


def _settings(args: argparse.Namespace, items: list[Workload]) -> Record:
    named = ("dtype", "device", "max_new_tokens", "per_set", "rounds", "strict")
    return {
        "record": "settings",
        "model": Path(args.model).name if args.model else models.embedded.NAME,
        **GREEDY,
        **{name: getattr(args, name) for name in named},
        "prompts": len(items),
        "backends_there": {op: backend.name for op, backend in ops.backends(args.device).items()},
    }


if __name__ == "__main__":
    sys.exit(main())
