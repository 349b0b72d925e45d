"""Acceptance before and after a draft has learnt from use, on texts of one domain and on others.

A folder of use is filled as `--learn` fills it: the default engine answers the domain's prompts. Then the head learns
for `--minutes`, and both heads answer fresh prompts of the domain and of other kinds. `specengine train learn FOLDER`
beforehand counts too.

    python -m research.use code --folder FOLDER --minutes 30 --prompts PROMPTS --per-set 8 --out FILE
    python -m research.use document --document TEXT --folder FOLDER --minutes 30 --prompts PROMPTS --out FILE
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import provenance, workloads
from bench.arguments import add_arguments
from research import bootstrap
from specengine import Engine
from specengine.train.draft.use import Learner, UseOptions

FRESH = 5  # every fifth prompt is for measuring alone
MODULES = 60  # of Python's library
TOPICS = (
    "die Sonne", "der Mond", "ein Vulkan", "das Meer", "ein Fluss", "der Wald", "ein Berg", "die Wüste", "das Wetter",
    "der Regen", "ein Gewitter", "der Schnee", "das Licht", "der Schall", "die Schwerkraft", "ein Magnet", "der Strom",
    "eine Batterie", "ein Motor", "das Fahrrad", "ein Auto", "die Eisenbahn", "ein Flugzeug", "ein Schiff",
    "die Brücke", "ein Haus", "die Schule", "eine Bibliothek", "ein Museum", "das Krankenhaus", "die Küche",
    "das Brot", "der Käse", "die Milch", "ein Apfel", "der Kaffee", "der Tee", "das Salz", "der Zucker",
    "die Schokolade", "ein Hund", "eine Katze", "ein Pferd", "die Kuh", "ein Vogel", "der Fisch", "die Biene",
    "ein Baum", "die Rose", "das Gras", "das Herz", "das Gehirn", "die Lunge", "das Auge", "der Schlaf", "der Sport",
    "der Fußball", "das Schwimmen", "das Wandern", "die Musik", "die Geige", "das Klavier", "ein Lied", "das Theater",
    "ein Film", "ein Buch", "die Zeitung", "ein Brief", "das Telefon", "der Computer", "das Internet", "ein Roboter",
    "die Mathematik", "die Physik", "die Chemie", "die Biologie", "die Geschichte", "die Sprache", "das Recht",
    "die Demokratie", "eine Wahl", "das Geld", "eine Bank", "der Markt", "die Arbeit", "der Urlaub", "die Familie",
    "die Freundschaft", "das Glück", "die Angst", "der Frieden", "Berlin", "Hamburg", "München", "Wien", "die Schweiz",
    "der Rhein", "die Alpen", "die Nordsee", "Europa", "Afrika", "Asien", "der Winter", "der Frühling", "der Sommer",
    "der Herbst", "Weihnachten", "Ostern", "der Geburtstag", "die Uhr", "der Kalender", "die Landkarte",
)  # fmt: skip
SENTENCES = (
    "Viele Menschen denken jeden Tag daran.", "Früher war das alles ganz anders.", "Das weiß heute fast jedes Kind.",
    "In der Schule haben wir viel darüber gelernt.", "Meine Großmutter hat mir oft davon erzählt.",
    "Am Anfang konnte ich es kaum glauben.", "Man muss sich nur ein wenig Zeit nehmen.",
    "Es gibt dafür einen einfachen Grund.", "Die meisten Leute wissen das nicht.", "Das ist gar nicht so leicht.",
    "Wir haben lange darüber gesprochen.", "Gestern habe ich ein Buch dazu gelesen.", "Nicht alle sind dieser Meinung.",
    "Am Abend saßen wir noch lange zusammen.", "Die Kinder haben sich sehr darüber gefreut.",
    "In den letzten Jahren hat sich viel verändert.", "Das kostet nicht nur Geld, sondern auch Zeit.",
    "Trotzdem möchte ich nicht darauf verzichten.", "Auf dem Land ist es noch immer so.",
    "Manchmal ist weniger mehr.", "Der Weg dorthin war lang und schwer.", "Niemand hatte damit gerechnet.",
    "Heute sieht man das in jeder Stadt.", "Ich erinnere mich noch gut an den ersten Tag.",
)  # fmt: skip


def code() -> Iterator[str]:
    """Yield the beginnings of functions of Python's library, module by module."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(folder.glob("*.py"))[:MODULES]:
        try:
            source = file.read_text(encoding="utf-8")
            found = [
                node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
            ]
        except (OSError, ValueError, SyntaxError):
            continue
        lines = source.splitlines()
        documented = [node for node in found if ast.get_docstring(node) and len(node.body) > 2]
        for node in documented[:6]:
            begin = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
            if len(begin) < 1500:
                yield f"Complete this Python function.\n\n```python\n{begin}\n```"


def german() -> Iterator[str]:
    """Yield beginnings of German texts."""
    order = random.Random(0)
    for topic in TOPICS:
        for _ in range(2):
            yield f"Thema: {topic}. {' '.join(order.sample(SENTENCES, 6))}"


def document(text: str, passages: int = 200, characters: int = 1600) -> Iterator[str]:
    """Yield requests about passages of one text."""
    asked = (
        "Summarize this passage.",
        "Rewrite this passage in simple words.",
        "List the facts in this passage.",
    )
    for number in range(min(passages, len(text) // characters)):
        yield f"{asked[number % 3]}\n\n{text[number * characters : (number + 1) * characters].strip()}"


def split(prompts: list[str], fresh: int = FRESH) -> tuple[list[str], list[str]]:
    """Return prompts of use and fresh ones, both in an order that a seed of 0 gives."""
    random.Random(0).shuffle(prompts)
    return [p for i, p in enumerate(prompts) if i % fresh], prompts[::fresh]


TREE = {"width": 10, "expansions": 6, "budget": 60}  # EAGLE's
# this model answers requests in German in English
ASKED = {"german": {"raw": True, "temperature": 0.8, "seed": 1}}
# no way of `auto`: what it drafts follows the costs that its engine has measured, not the head alone
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"lookup": False, "policy": "eagle", "policy_options": TREE}
}


def measured(
    sets: dict[str, list[str]], tokens: int, folder: Path | None
) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield token and cycle counts of each answer, by set and way: the head alone with EAGLE's tree."""
    for way, options in WAYS.items():
        engine = Engine.from_pretrained(learn=folder, **options)
        engine.ring = None  # nothing is kept, and the head stays
        for name, prompts in sets.items():
            stats = [
                engine.generate(prompt, max_new_tokens=tokens, **asked(name)).stats
                for prompt in prompts
            ]
            yield (name, way), [(each.num_generated_tokens, each.num_spec_steps) for each in stats]


def asked(name: str) -> dict[str, Any]:
    """Return how the prompts of a set are asked."""
    return ASKED.get(name, {"temperature": 0.0})


def ratio(counts: Sequence[tuple[int, int]]) -> float:
    """Return tokens per cycle."""
    return sum(tokens for tokens, _ in counts) / max(1, sum(cycles for _, cycles in counts))


def gain(pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Return the gain in tokens per cycle in per cent. pairs: counts of each prompt before and after."""
    before, after = zip(*pairs, strict=True)
    return round(100 * (ratio(after) / ratio(before) - 1), 1)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    text = args.document.read_text(encoding="utf-8") if args.document else ""
    use, fresh = split(
        list({"code": code, "german": german, "document": lambda: document(text)}[args.domain]())
    )
    sets = {args.domain: fresh[: args.fresh]}
    for item in workloads.read(args.prompts, args.per_set):
        sets.setdefault(item.set, []).append(item.text)
    given = {
        name: getattr(args, name) for name in ("domain", "minutes", "max_new_tokens", "per_set")
    }
    yield {"record": "settings", **given, "texts": len(use), **asdict(UseOptions())}
    engine = Engine.from_pretrained(learn=args.folder)
    for prompt in use[len(engine.ring.texts()) :]:  # a run that broke off goes on
        engine.generate(prompt, max_new_tokens=args.max_new_tokens, **asked(args.domain))
    before = dict(measured(sets, args.max_new_tokens, None))
    learner = Learner(engine, progress=lambda line: print(line, file=sys.stderr, flush=True))
    learner.general()
    if args.minutes:
        learner.learn(60 * args.minutes)
    rounds = learner.learnt.rounds()
    seconds, cpu_seconds = (
        round(sum(each[name] for each in rounds)) for name in ("seconds", "cpu_seconds")
    )
    tokens = sum(len(text.tokens) for text in learner.learnt.texts())
    yield {"record": "learning", "seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
    for each in rounds:
        yield {"record": "round", **each}
    after = dict(measured(sets, args.max_new_tokens, args.folder))
    others = {("others", way): [name for name in sets if name != args.domain] for way in WAYS}
    for (name, way), counts in before.items():
        yield compared(name, way, list(zip(counts, after[name, way], strict=True)))
    for (name, way), names in others.items():
        yield compared(
            name,
            way,
            [pair for one in names for pair in zip(before[one, way], after[one, way], strict=True)],
        )


def compared(
    name: str, way: str, pairs: list[tuple[tuple[int, int], tuple[int, int]]]
) -> dict[str, Any]:
    before, after = (round(ratio(counts), 3) for counts in zip(*pairs, strict=True))
    spread = bootstrap.interval([gain(sample) for sample in bootstrap.samples(pairs)])
    return {"record": "acceptance", "set": name, "way": way, "prompts": len(pairs), "before": before, "after": after,
            "gain": gain(pairs), "interval": spread}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("domain", choices=("code", "german", "document"))
    parser.add_argument(
        "--folder", type=Path, required=True, help="of use: new, or of a run that broke off"
    )
    parser.add_argument("--document", type=Path, help="the text of domain document")
    parser.add_argument(
        "--minutes", type=float, default=30, help="to learn for; 0: measure what is learnt"
    )
    parser.add_argument(
        "--fresh", type=int, default=24, help="prompts of the domain that are measured"
    )
    add_arguments(parser, "prompts", "per_set", "max_new_tokens", "out")
    args = parser.parse_args()
    provenance.show(run(args), args.out)


if __name__ == "__main__":
    main()
