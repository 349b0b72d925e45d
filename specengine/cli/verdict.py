"""One sentence on whether speculation pays here and why, from measured costs and observed acceptance."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

from specengine.benchmark.records import Record
from specengine.benchmark.summaries import ALL, summaries
from specengine.costs.measuring import busy, stored
from specengine.engine import Engine
from specengine.records import Stats

if TYPE_CHECKING:
    from specengine.costs import PassCosts

SAME = 0.05  # of the speed: below what a few answers can tell
MOSTLY_PLAIN = 1.5  # verified nodes per pass
EXAMPLE = 12  # nodes of a tree that stands for those that were not drafted
WIDEST = 8  # nodes of a draft pass


class Seen(NamedTuple):
    """Averages per verification of answers that were drafted.

    tokens  committed, the bonus token included
    nodes   verified, the root included
    passes  of the draft
    gain    tokens per second over those of plain decoding, where both were timed
    """

    tokens: float
    nodes: float
    passes: float
    gain: float | None = None

    @classmethod
    def of(cls, answers: Iterable[Stats]) -> Self | None:
        """Return the averages over answers; None without a verification."""
        answers = list(answers)
        steps = sum(stats.num_spec_steps for stats in answers)
        if not steps:
            return None
        tokens = sum(stats.num_emitted_in_steps for stats in answers)
        drafted = sum(stats.num_draft_tokens for stats in answers)
        return cls(
            tokens / steps,
            1 + drafted / steps,
            sum(stats.num_draft_passes for stats in answers) / steps,
        )

    @classmethod
    def of_ways(cls, records: Iterable[Record], ways: Iterable[str]) -> dict[str, Self]:
        """Return the averages of those of the ways that a benchmark timed next to plain decoding, the fastest first."""
        timed = [
            each for each in summaries(records) if each["set"] == ALL and "speed_total" in each
        ]
        return {
            each["way"]: cls(each["tau"], each["verified"], each["delta"], each["speed_total"])
            for each in sorted(timed, key=lambda each: -float(each["speed_total"]))
            if each["way"] in ways
        }


def break_even(costs: "PassCosts", nodes: float, passes: float = 0.0) -> float:
    """Return the tokens that a cycle must commit to be as fast as plain decoding."""
    width = min(WIDEST, max(1, round(nodes / passes))) if passes else 1
    drafting = (costs.cycle(1, (width,)) - costs.plain - costs.overhead) * passes
    whole = int(nodes)
    below, above = costs.cycle(whole, ()), costs.cycle(whole + 1, ())
    return (below + (above - below) * (nodes - whole) + drafting) / costs.plain


def known_costs(engine: Engine) -> "PassCosts | None":
    """Return the costs of an engine, if they have been measured or its policy reads them."""
    if engine.drafter is None or engine.policy is None:
        return None
    parts = engine.target, engine.drafter, engine.drivers.own.captured
    if not (engine.policy.plan().reads_costs or stored.is_stored(stored.identity(*parts))):
        return None
    return stored.find(*parts)


def verdict(
    device: str, costs: "PassCosts | None", averages: Seen | None, others: float | None = None
) -> str:
    """Return whether speculation pays and why, in one sentence, and in another one whether the machine was busy.

    device: its type, as torch has it; costs: None where they are not known; averages: None where nothing was drafted;
    others: share of the processors that other programs took meanwhile, None where it is not known.
    """
    text = _verdict(device, costs, averages)
    doubt = busy(others) or (None if costs is None else costs.doubt)
    return (
        text
        if averages is None or doubt is None
        else f"{text} This may be otherwise on a quiet machine: {doubt} meanwhile."
    )


def _verdict(device: str, costs: "PassCosts | None", averages: Seen | None) -> str:
    kind = {"cpu": "CPU", "cuda": "GPU"}.get(device, device)
    if averages is None:
        return f"Whether speculation pays on this {kind} is not known: no answer was drafted."
    needed = None if costs is None else break_even(costs, averages.nodes, averages.passes)
    gain = averages.gain
    if gain is None:
        if needed is None:
            return (
                f"Whether speculation pays on this {kind} is not known: a pass brought {averages.tokens:.2f} tokens, "
                "and what it costs was not measured (specengine doctor)."
            )
        gain = averages.tokens / needed
    advice = "; for such texts decode with policy 'plain'" if gain < 1 - SAME else ""
    return f"{_judged(gain, kind)}: {_why(costs, needed, averages)}{advice}."


def _judged(gain: float, kind: str) -> str:
    if abs(gain - 1) <= SAME:
        return f"Speculation changes little on this {kind} ({gain:.2f} times plain decoding)"
    return f"Speculation {'pays' if gain > 1 else 'does not pay'} on this {kind} ({gain:.2f} times plain decoding)"


def _why(costs: "PassCosts | None", needed: float | None, averages: Seen) -> str:
    brought = f"brought {averages.tokens:.2f} tokens"
    if costs is None or needed is None:
        return f"a pass over {averages.nodes:.1f} tokens, with {averages.passes:.1f} draft passes, {brought}"
    if averages.nodes < MOSTLY_PLAIN:
        return (
            f"drafts rarely promised more than they cost, as a pass over {EXAMPLE} tokens takes "
            f"{break_even(costs, EXAMPLE):.1f} times as long as over one, and a pass {brought}"
        )
    return (
        f"a pass over {averages.nodes:.1f} tokens with {averages.passes:.1f} draft passes takes {needed:.2f} times "
        f"as long as one of plain decoding, and it {brought}"
    )
