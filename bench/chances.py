"""Count how often drafted tokens of each kind are accepted: the initial counts of `auto`, and calibration errors.

The default engine answers each prompt once under `auto`, greedily and at temperature 1. In half of the cycles it does
not skip draft passes, so that every source is seen everywhere. These counts never decay.

    python -m bench.chances --prompts FILE --out bench/results/chances.jsonl --prior PRIOR.safetensors

With `--draft recycling` the counts are those of drafts without a head; they replace these groups of PRIOR alone. Each
`--model` answers all prompts, and their outcomes count alike.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench import provenance, workloads
from bench.arguments import add_arguments
from specengine import Engine
from specengine.files import atomic
from specengine.ops.tree import TokenTree
from specengine.ops.worth import DEPTHS, KNOTS, ODDS, RANKS, SOURCES, knot_of
from specengine.policies.auto import Auto
from specengine.records import Outcome

UNTRAINED = 2  # groups, greedy and sampled, before those of drafts without a head
GROUPS = 2 * UNTRAINED
KINDS = ("draft", "copied", "recycled", "copied and recycled")
DOUBT = 12.0  # tries that a broader cell counts for in a narrower one


class Watched(Auto):
    """`auto` with counts that never decay, and a draft pass in half of the cycles that could skip it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hits, self.tries = torch.zeros(
            2, GROUPS * SOURCES * DEPTHS * RANKS, KNOTS, dtype=torch.float64
        ).unbind()
        # cell, stated, counted chance, whether it was accepted
        self.seen: list[tuple[int, float, float, bool]] = []
        self._random = random.Random(0)

    def _first(self, tree: TokenTree, state: Any) -> torch.Tensor:
        free = tree.free
        if (
            tree.origin == "draft" and self._random.random() < 0.5
        ):  # without free continuations nothing makes up for a pass
            tree.free = None
        drafts = super()._first(tree, state)
        tree.free = free
        return drafts

    def learn(self, outcome: Outcome) -> None:
        tree, path, chosen, _ = outcome
        notes, size = self._state[tree.device].bound.notes, len(tree)
        wanted = dict(zip(path.alive().tolist(), chosen.tolist(), strict=True))
        for node in range(1, size):
            if (parent := int(tree.parents[node])) in wanted:
                hit, stated = wanted[parent] == int(tree.tokens[node]), notes.stated[node]
                cell, at = int(notes.cells[node]), float(knot_of(stated, KNOTS))
                low = min(int(at), KNOTS - 2)
                for knot, weight in ((low, 1 - (at - low)), (low + 1, at - low)):
                    self.tries[cell, knot] += weight
                    self.hits[cell, knot] += weight * hit
                self.seen.append(
                    (cell, float(stated.exp()), float(tree.log_probs[node].exp()), hit)
                )
        super().learn(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts", type=Path, help="JSON list of prompts; default: a few built-in prompts"
    )
    add_arguments(parser, "max_new_tokens", "out")
    parser.add_argument(
        "--prior", type=Path, help="write the counts as the initial counts of new engines"
    )
    parser.add_argument("--model", action="append", help="another model than the default one")
    parser.add_argument("--draft", help="another draft than the model's default one")
    args = parser.parse_args()
    prompts = (
        json.loads(args.prompts.read_text())
        if args.prompts
        else [w.text for w in workloads.read(None, 99)]
    )
    given: dict[str, Any] = {} if args.draft is None else {"draft": args.draft}
    policies = [Watched() for _ in args.model or [None]]
    for model, policy in zip(args.model or [None], policies, strict=True):
        engine = Engine.from_pretrained(model, policy=policy, memory="off", **given)
        for number, prompt in enumerate(prompts):
            for temperature in (0.0, 1.0):
                engine.generate(
                    prompt, max_new_tokens=args.max_new_tokens, temperature=temperature, seed=number
                )
            if number % 10 == 9:
                print(
                    f"{number + 1} of {len(prompts)} prompts, {len(policy.seen):,} outcomes",
                    flush=True,
                )
    seen = [outcome for policy in policies for outcome in policy.seen]
    records = [{"record": "chances", "prompts": len(prompts), **row} for row in calibration(seen)]
    provenance.show(records, args.out)
    if args.prior:
        write(args.prior, policies, {"outcomes": str(len(seen)), "prompts": str(len(prompts))})


def write(file: Path, policies: Sequence[Watched], about: dict[str, str]) -> None:
    """Write the groups of the policies' draft, and with a head the profile; keep what else the file holds."""
    table = smoothed(
        *(sum(getattr(policy, name) for policy in policies) for name in ("hits", "tries"))
    )
    state = policies[0]._state[torch.device("cpu")]
    prior = {"table": table.float(), "profile": state.bound.counts.profile.clone()}
    if file.exists():
        known = load_file(file)
        half = len(table) // 2
        if state.trained:
            prior["table"][half:] = known["table"][half:]
        else:
            prior["table"][:half], prior["profile"] = known["table"][:half], known["profile"]
    with atomic(file) as part:
        save_file(prior, part, metadata=about)


def calibration(seen: list[tuple[int, float, float, bool]]) -> list[dict[str, Any]]:
    """Return calibration errors of stated and counted probabilities, over ten equal bins, by group and source."""
    rows = []
    for group, name in enumerate(("greedy", "temperature 1") * 2):
        for source in range(SOURCES):
            own = [
                (stated, counted, hit)
                for cell, stated, counted, hit in seen
                if _kind(cell) == (group, source)
            ]
            if not own:
                continue
            label = KINDS[source % 4] + (", without a pass" if source >= 4 else "")
            label += ", without a head" if group >= UNTRAINED else ""
            stated, counted = (_error([(item[i], item[2]) for item in own]) for i in (0, 1))
            errors = {"stated_error": stated, "counted_error": counted}
            rows.append({"sampling": name, "source": label, "outcomes": len(own), **errors})
    return rows


def _kind(cell: int) -> tuple[int, int]:
    """Return group and source."""
    return divmod(cell // (DEPTHS * RANKS), SOURCES)


def _error(pairs: list[tuple[float, bool]]) -> float:
    """Return the mean distance of probabilities from shares of hits, over ten bins."""
    total = 0.0
    for tenth in range(10):
        own = [(chance, hit) for chance, hit in pairs if min(int(chance * 10), 9) == tenth]
        total += abs(sum(chance for chance, _ in own) - sum(hit for _, hit in own))
    return round(total / len(pairs), 4)


def smoothed(hits: Tensor, tries: Tensor) -> Tensor:
    """Smooth the chances by cell and knot: from a source at large, then by rank, then by depth, as evidence allows."""
    shape = (GROUPS, SOURCES, DEPTHS, RANKS, KNOTS)
    hits, tries = hits.view(shape), tries.view(shape)
    chances = torch.linspace(-ODDS, ODDS, KNOTS, dtype=torch.float64).sigmoid().expand(shape)
    for dims in ((2, 3), (2,), ()):
        own, all_tries = (part.sum(dims, keepdim=True) if dims else part for part in (hits, tries))
        chances = (own + DOUBT * chances) / (all_tries + DOUBT)
    return chances.reshape(-1, KNOTS)


if __name__ == "__main__":
    main()
