"""Whether the logits before the root name tokens behind it that copies and recycled tokens miss. No draft runs.

LogitSpec (2507.01449) takes the likeliest tokens of the last logits, which gave the root, as guesses of the token after
it, and looks for what followed root and guess in the text. Here a model writes answers greedily; at each token of them
the next one is looked for among three groups of guesses, from what was known before it:

copies      what followed the longest earlier occurrences of the last tokens, newest first
recycled    the likeliest tokens after the root where it stood last (Token Recycling 2408.08696)
second      the likeliest tokens of the logits that gave the root; `pairs` of them: those that followed the root before

A record of a set and number of guesses has the share of tokens that each group holds, the share that `second` and
`pairs` hold and both others miss, and how many guesses these add to theirs.

    python -m bench.second_step --prompts prompts --per-set 4 --out bench/results/second-step.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from bench.arguments import add_arguments
from bench.provenance import Record, show
from specengine import Engine
from specengine.benchmark import workloads
from specengine.checking import huggingface_model
from specengine.request.prompts import token_ids

GUESSES = (2, 4, 8)  # in each group
LONGEST = 5  # tokens of a context that is looked for
GROUPS = ("copies", "recycled", "second", "pairs")


def copies(tokens: Sequence[int], most: int) -> list[int]:
    """Return up to `most` tokens that followed the end of `tokens` before, after longer contexts first."""
    following = dict[int, None]()
    for size in range(min(LONGEST, len(tokens) - 1), 0, -1):
        context = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == context:
                following.setdefault(tokens[end])
    return list(islice(following, most))


def guesses(
    tokens: Sequence[int], likeliest: Sequence[Sequence[int]], most: int
) -> dict[str, list[int]]:
    """Return the guesses of each group for the token after `tokens`.

    likeliest: after each of `tokens` but the last one, the likeliest next tokens, in falling order
    """
    root = tokens[-1]
    before = [place for place, token in enumerate(tokens[:-1]) if token == root]
    second = [token for token in likeliest[-1] if token != root][:most]
    followers = {tokens[place + 1] for place in before}
    return {
        "copies": copies(tokens, most),
        "recycled": list(likeliest[before[-1]][:most]) if before else [],
        "second": second,
        "pairs": [token for token in second if token in followers],
    }


class Counts:
    """How often each group holds the next token, and what `second` and `pairs` add to the others."""

    def __init__(self) -> None:
        self.tokens = 0
        self.held: dict[str, int] = defaultdict(int)
        self.added: dict[str, int] = defaultdict(int)
        self.more: dict[str, int] = defaultdict(int)

    def count(self, groups: dict[str, list[int]], following: int) -> None:
        self.tokens += 1
        known = {*groups["copies"], *groups["recycled"]}
        for name in GROUPS:
            self.held[name] += following in groups[name]
        for name in ("second", "pairs"):
            new = [token for token in groups[name] if token not in known]
            self.added[name] += following in new
            self.more[name] += len(new)

    def record(self, name: str, most: int) -> Record:
        """Return shares of the tokens, and guesses per token."""
        return {
            "record": "second step",
            "set": name,
            "guesses": most,
            "tokens": self.tokens,
            "held": {group: round(self.held[group] / self.tokens, 4) for group in GROUPS},
            "added": {group: round(count / self.tokens, 4) for group, count in self.added.items()},
            "guesses_added": {
                group: round(count / self.tokens, 3) for group, count in self.more.items()
            },
        }


@torch.inference_mode()
def likeliest_tokens(engine: Engine, tokens: list[int], most: int) -> list[list[int]]:
    """Return the likeliest next tokens after each of `tokens`, in falling order."""
    model = huggingface_model(engine.target)
    logits = model(torch.tensor([tokens], dtype=torch.int64, device=model.device)).logits[0]
    best: list[list[int]] = logits.topk(most).indices.tolist()
    return best


def records(args: argparse.Namespace) -> Iterator[Record]:
    engine = Engine.from_pretrained(args.model, None, "plain", memory="off")
    items = workloads.read([args.prompts] if args.prompts else None, args.per_set)
    yield {"record": "prompts", "digest": workloads.digest(items), "count": len(items)}
    counts = {(name, most): Counts() for name in [*_sets(items), "all"] for most in GUESSES}
    for item in items:
        prompt = token_ids(
            item.text,
            engine.tokenizer,
            raw=False,
            vocab_size=engine.target.vocab_size,
            max_context=engine.target.max_context,
        )
        answer = engine.generate(prompt, max_new_tokens=args.max_new_tokens, temperature=0.0)
        tokens = [*prompt, *answer.token_ids]
        likeliest = likeliest_tokens(engine, tokens, max(GUESSES) + 1)
        for end in range(len(prompt) + 1, len(tokens)):
            for most in GUESSES:
                groups = guesses(tokens[:end], likeliest[: end - 1], most)
                for name in (item.set, "all"):
                    counts[name, most].count(groups, tokens[end])
    for (name, most), each in counts.items():
        yield each.record(name, most)


def _sets(items: Sequence[workloads.Workload]) -> list[str]:
    return list(dict.fromkeys(item.set for item in items))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.second_step", description=(__doc__ or "").splitlines()[0]
    )
    add_arguments(parser, "model", "prompts", "per_set", "max_new_tokens", "out")
    args = parser.parse_args(argv)
    show(records(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
