"""The interleaved run: every way answers every prompt once per round, in turn, with plain decoding's answer.

Records, as they come: `way` for each that can run, `not run` for each that cannot, `answer` for each measured answer,
and once a prompt is through a `row` per way, with what its answers are against plain decoding's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from specengine.benchmark.records import Record
from specengine.benchmark.summaries import Answer, first_difference, row
from specengine.benchmark.ways import PLAIN, Way, WayDecoder
from specengine.benchmark.workloads import Workload
from specengine.checking import Judged, judge
from specengine.engine import Engine
from specengine.errors import is_fault
from specengine.request.prompts import Prompt
from specengine.request.text import Decoder

WARM_UP = "Count: one, two, three, one, two, three, one, two,"
WARM_UP_TOKENS = 16

T = TypeVar("T")
Answers = dict[str, dict[int, Answer]]  # by way and round


class Run:
    """All ways over all prompts.

    plain    an engine without a draft on the target: it tells prompts' tokens, and near-ties from faults
    options  of Engine.generate but for the length, which every way decodes under
    turns    this many of a conversation's turns are asked, later ones after plain decoding's answers
    compares whether answers of ways that are not ours are held against plain decoding's: not where they are drawn
    say      called with a line per answered prompt
    """

    def __init__(
        self,
        plain: Engine,
        ways: Sequence[Way],
        options: dict[str, Any],
        *,
        length: int,
        rounds: int = 1,
        turns: int = 1,
        compares: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plain, self.ways, self.options = plain, list(ways), options
        self.length, self.rounds, self.turns, self.compares, self.say = (
            length,
            rounds,
            turns,
            compares,
            say,
        )
        self.faults = 0  # of our own ways: errors that nobody expected, and answers that are not plain decoding's
        self._decoders: dict[str, list[WayDecoder]] = {}

    def records(self, items: Sequence[Workload], done: Iterable[Record] = ()) -> Iterator[Record]:
        """Yield the records that are not among `done`, those of an earlier run; its faults count too."""
        done = list(done)
        answers = _answers(done)
        rows = {
            (record["set"], record["id"], record["way"])
            for record in done
            if record["record"] == "row"
        }
        started = {record["way"] for record in done if record["record"] == "way"}
        lost = {record["way"] for record in done if record["record"] == "not run"}
        self.faults += sum(bool(record.get("fault")) for record in done)
        self.ways = [way for way in self.ways if way.name not in lost]
        yield from self._start(started, longest(self.plain, items, self.length, self.turns))
        for number, item in enumerate(items):
            for id_, prompt in self._questions(item, answers):
                place = item.set, id_
                yield from self._asked(place, prompt, number, answers[place])
                for way in self.ways:
                    if (item.set, id_, way.name) not in rows:
                        yield self._row(place, way, prompt, answers[place])
                first = {way.name: answers[place][way.name][0] for way in self.ways}
                rates = ", ".join(
                    f"{name} {len(one.tokens) / one.seconds:.1f}" for name, one in first.items()
                )
                self.say(f"{number + 1}/{len(items)} {item.set} {id_}, tokens/s: {rates}")

    def _start(self, started: set[str], longest: int) -> Iterator[Record]:
        """Make the decoders and try them: errors of a policy or a draft show in its first cycles."""
        prompt = tokens_of(self.plain, WARM_UP)
        for way in list(self.ways):
            try:
                decoders = [way.start() for _ in range(self.rounds)]
                for decode in decoders:
                    decode.prepare(longest)
                    decode(prompt, min(WARM_UP_TOKENS, self.length))
            except Exception as error:
                yield self._dropped(way, error)
            else:
                self._decoders[way.name] = decoders
                if way.name not in started:
                    yield {
                        "record": "way",
                        "way": way.name,
                        "ours": way.ours,
                        **way.facts,
                        **decoders[0].facts,
                    }

    def _questions(
        self, item: Workload, answers: dict[tuple[str, str], Answers]
    ) -> Iterator[tuple[str, list[int]]]:
        """Yield ids and token ids of the turns; each is answered before the next one is made."""
        messages: list[dict[str, str]] = []
        for number, text in enumerate(item.turns[: self.turns], start=1):
            id_ = item.id if number == 1 else f"{item.id}/{number}"
            question = {"role": "user", "content": text}
            yield id_, tokens_of(self.plain, [*messages, question] if messages else text)
            if number < min(self.turns, len(item.turns)):
                tokens = answers[item.set, id_][PLAIN][0].tokens
                messages += [
                    question,
                    {"role": "assistant", "content": Decoder(self.plain.tokenizer)(tokens)},
                ]

    def _asked(
        self, place: tuple[str, str], prompt: list[int], number: int, answers: Answers
    ) -> Iterator[Record]:
        """Yield the missing answers."""
        for round_ in range(self.rounds):
            for way in rotated(self.ways, number + round_):
                if round_ in answers[way.name] or way not in self.ways:
                    continue
                # what the way before left to do is not this one's time
                _finish(self.plain.target.device)
                try:
                    answer = self._decoders[way.name][round_](prompt, self.length)
                except Exception as error:
                    yield self._dropped(way, error, place)
                    continue
                answers[way.name][round_] = answer
                head = {
                    "record": "answer",
                    "way": way.name,
                    "set": place[0],
                    "id": place[1],
                    "round": round_,
                }
                figures = {**answer._asdict(), "seconds": round(answer.seconds, 6)}
                if answer.first is not None:
                    figures["first"] = round(answer.first, 6)
                yield {**head, **figures}

    def _row(self, place: tuple[str, str], way: Way, prompt: list[int], answers: Answers) -> Record:
        rounds = [answers[way.name][round_] for round_ in range(self.rounds)]
        record = {"record": "row", "way": way.name, "set": place[0], "id": place[1], **row(rounds)}
        if answers.get(way.against) and (way.ours or self.compares):
            record |= self._compared(prompt, answers[way.against][0].tokens, rounds)
        if way.ours and record.get("verdict") == "mismatch":
            record["fault"] = True
            self.faults += 1
        return record

    def _compared(
        self, prompt: list[int], expected: list[int], answers: Sequence[Answer]
    ) -> Record:
        """Return the first position where an answer leaves plain decoding's, and the worst verdict on these answers."""
        others = {
            tuple(answer.tokens): answer.tokens for answer in answers if answer.tokens != expected
        }
        places = [
            place
            for tokens in others.values()
            if (place := first_difference(expected, tokens)) is not None
        ]
        record: Record = {"diverges_at": min(places, default=None), "verdict": "exact"}
        for tokens in others.values():
            judged = judge(
                self.plain, prompt, tokens, expected, max_new_tokens=self.length, **self.options
            )
            if record["verdict"] != "mismatch":
                record |= {"verdict": judged.verdict, "gap": _largest_gap(judged)}
        return record

    def _dropped(self, way: Way, error: Exception, place: tuple[str, str] | None = None) -> Record:
        """Return the record of a way that takes no further part. An error that is not specengine's own is a fault."""
        if way.name == PLAIN:
            raise error
        fault = is_fault(error)
        self.faults += fault
        self.ways = [other for other in self.ways if other is not way]
        reason = f"{type(error).__name__}: {error}"
        self.say(f"{way.name} {'failed' if fault else 'cannot run'}: {reason}")
        where = {} if place is None else {"set": place[0], "id": place[1]}
        return {
            "record": "not run",
            "way": way.name,
            "reason": reason,
            "fault": fault,
            **way.facts,
            **where,
        }


def tokens_of(plain: Engine, prompt: Prompt) -> list[int]:
    return plain.stream(prompt, max_new_tokens=1).prompt


def longest(plain: Engine, items: Sequence[Workload], length: int, turns: int = 1) -> int:
    """Return an upper bound on the tokens of the longest conversation with its answers."""
    turns_of = [item.turns[:turns] for item in items]
    return max(sum(len(tokens_of(plain, text)) + length for text in texts) for texts in turns_of)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _answers(done: Iterable[Record]) -> dict[tuple[str, str], Answers]:
    by_prompt: dict[tuple[str, str], Answers] = defaultdict(lambda: defaultdict(dict))
    for record in done:
        if record["record"] == "answer":
            answer = Answer(**{name: record[name] for name in Answer._fields if name in record})
            by_prompt[record["set"], record["id"]][record["way"]][record["round"]] = answer
    return by_prompt


def _largest_gap(judged: Judged) -> float | None:
    """Return the largest gap of all flips, in logits; None where there is none, or an infinite one."""
    gap = max((flip.gap for flip in judged.flips), default=float("inf"))
    return None if gap == float("inf") else round(gap, 5)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items, those first whose turn it is to be first."""
    turn %= len(items)
    return [*items[turn:], *items[:turn]]
