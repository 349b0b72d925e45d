"""Requests of the kinds that users send to a model, about passages that the model wrote itself.

A chat model that is prompted with the bare beginning of a user's turn mostly writes short questions. Real users also
ask for code, sums, summaries, translations and facts from a text, and a draft should have seen such answers. All
requests come from templates and lists in this file and from the model's own text, none from a data set.

    python -m research.requests asks.jsonl --data my-text --target MODEL
    specengine train data more-text --target MODEL --prompts asks.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specengine.engine import Engine
from specengine.errors import InputError, require
from specengine.files import atomic
from specengine.train.text.corpus import Corpus

MIN_PASSAGE, MAX_PASSAGE = 120, 1600  # characters
FOLLOW_UPS = (
    "Make that shorter.",
    "Explain the second point in more detail.",
    "Now write it for a child of eight.",
    "Why is that so?",
    "Give me an example.",
    "Put that into a numbered list.",
    "What would be a good title for this?",
    "Are you sure? Check it again step by step.",
)
SUMMARIES = (
    "Summarise this text in {few} sentences:",
    "Summarize the following article:",
    "What are the main points of this text?",
    "Give the gist of this in one sentence:",
    "TL;DR of the text below, please.",
    "Write a headline and {few} bullet points for this:",
    "Shorten this to half its length:",
)
EXTRACTIONS = (
    "List all names of people and places in this text:",
    "Which numbers and dates does this text mention?",
    "Extract the nouns of the first sentence:",
    "What does the text say about its most important topic? Answer with a quotation.",
    "Return the key facts of this text as JSON with the fields topic, people and places:",
    "Which words in this text are the hardest to understand? Explain them.",
    "Answer from the text alone: what happens, to whom, and why?",
)
REWRITES = (
    "Correct the spelling and grammar of this text and repeat it:",
    "Rewrite this text in a formal tone:",
    "Rewrite this so that a beginner understands it:",
    "Turn this into an e-mail to a colleague:",
    "Repeat this text word for word, then count its sentences:",
    "Change this text from the present to the past tense:",
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese", "Dutch")
CODE = (
    "checks whether a string is a palindrome",
    "returns the n-th prime number",
    "merges two sorted lists",
    "counts how often each word occurs in a text",
    "finds the longest common prefix of a list of strings",
    "converts a Roman numeral to an integer",
    "removes duplicates from a list and keeps the order",
    "computes the greatest common divisor of two numbers",
    "rotates a list by k places",
    "reads a CSV file and returns the sum of a column",
    "flattens a nested list",
    "returns the second largest value of a list",
    "checks whether brackets are balanced",
    "turns seconds into hours, minutes and seconds",
    "finds all anagrams of a word in a list",
    "transposes a matrix",
    "validates an e-mail address",
    "implements binary search",
    "reverses the words of a sentence",
    "computes the moving average of a list",
    "groups a list of dictionaries by a key",
    "generates all subsets of a set",
    "counts the vowels of a string",
    "converts Celsius to Fahrenheit",
    "finds the first character that does not repeat",
    "splits a list into chunks of n items",
    "computes the distance between two points",
    "sorts a list of names by their length",
    "encodes a string with a Caesar cipher",
    "returns the digits of a number as a list",
    "finds the missing number between 1 and n",
    "computes compound interest",
)
CODE_FORMS = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}, with a docstring and an example.",
    "Implement a function that {task}. Explain how it works.",
    'Complete this function:\n\ndef {name}(value):\n    """A function that {task}."""\n',
    "How do I write code that {task}?",
    "Write a JavaScript function that {task}.",
    "Write tests for a Python function that {task}.",
)
SUMS = (
    "{who} has {a} {things} and buys {b} more. Then {who} gives away {c}. How many {things} are left?",
    "A shop sells {a} {things} in the morning and {k} times as many later. How many {things} does it sell that day?",
    "{who} packs {a} {things} into boxes of {k}. How many boxes are full, and how many {things} are left over?",
    "A train goes {a} km in {k} hours. How far does it go in {c} hours at the same speed?",
    "{who} earns {a} dollars an hour and works {k} hours a day for {c} days. How much does {who} earn in all?",
    "One of the {things} costs {k} dollars. {who} pays for {b} of them with {a} dollars too much. How much was paid?",
    "There are {a} {things} in a room. {p} percent of them are broken. How many still work?",
    "{who} reads {k} pages a day. The book has {a} pages, of which {b} are read. How many days are left?",
    "What is {a} times {k} plus {b}? Show each step.",
    "A rectangle is {a} cm long and {k} cm wide. What are its area and its perimeter?",
)
PEOPLE = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elif",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jonas",
    "Kim",
    "Lena",
    "Maria",
    "Noah",
)
THINGS = (
    "apples",
    "books",
    "pencils",
    "marbles",
    "eggs",
    "chairs",
    "stickers",
    "lamps",
    "loaves",
    "tickets",
    "plants",
    "coins",
)
SUBJECTS = (
    "the telephone",
    "photosynthesis",
    "the French Revolution",
    "gravity",
    "the Great Wall of China",
    "penicillin",
    "the violin",
    "volcanoes",
    "the Roman Empire",
    "democracy",
    "the printing press",
    "black holes",
    "coffee",
    "the Amazon rainforest",
    "DNA",
    "the Olympic Games",
    "inflation",
    "the steam engine",
    "vaccines",
    "the Silk Road",
    "earthquakes",
    "the moon",
    "chess",
    "electric cars",
    "the ozone layer",
    "the Nile",
    "jazz",
    "plastic",
    "the internet",
    "honey bees",
    "glaciers",
    "the compass",
)
FACTS = (
    "What is {subject}?",
    "Who first described or built {subject}, and when?",
    "why is {subject} important",
    "Name three facts about {subject}.",
    "Where does the name of {subject} come from?",
    "when did {subject} begin",
    "Explain {subject} to a ten-year-old.",
    "What are common mistakes people make about {subject}?",
    "Write a short poem about {subject}.",
    "Compare {subject} with {other}.",
    "Write a quiz of three questions about {subject}.",
)
COUNTS = ("two", "three", "four", "five")


def requests(count: int, passages: Sequence[str], seed: int = 0) -> list[list[str]]:
    """Return `count` conversations of one or two user turns each. The kinds alternate; the same seed gives the same.

    passages: the model's own texts. Short ones are skipped, long ones are cut at the end of a sentence. Raise
    InputError if none is long enough.
    """
    require("count", count, "1 or more", count >= 1)
    usable = [passage for text in passages if len(passage := _cut(text)) >= MIN_PASSAGE]
    if not usable:
        raise InputError(f"passages: none of {len(passages)} has {MIN_PASSAGE} characters")
    draw = random.Random(seed)
    kinds: tuple[Callable[[random.Random, Sequence[str]], str], ...] = (
        _about_text,
        _code,
        _sum,
        _about_text,
        _translate,
        _fact,
    )
    return [list(_turns(draw, kinds[number % len(kinds)](draw, usable))) for number in range(count)]


def _turns(draw: random.Random, first: str) -> Iterator[str]:
    yield first
    if draw.random() < 0.25:
        yield draw.choice(FOLLOW_UPS)


def _about_text(draw: random.Random, passages: Sequence[str]) -> str:
    request = draw.choice(draw.choice((SUMMARIES, SUMMARIES, EXTRACTIONS, REWRITES))).format(
        few=draw.choice(COUNTS)
    )
    text = "\n\n".join(draw.choices(passages, k=draw.choice((1, 1, 2))))
    return f"{text}\n\n{request}" if draw.random() < 0.3 else f"{request}\n\n{text}"


def _translate(draw: random.Random, passages: Sequence[str]) -> str:
    sentences = re.split(r"(?<=[.!?])\s+", draw.choice(passages).strip())
    first = draw.randrange(len(sentences))
    text = " ".join(sentences[first : first + 2])
    return f"Translate into {draw.choice(LANGUAGES)}: {text}"


def _code(draw: random.Random, _: Sequence[str]) -> str:
    task = draw.choice(CODE)
    name = "_".join(re.findall(r"[a-z]+", task)[:3])
    return draw.choice(CODE_FORMS).format(task=task, name=name)


def _sum(draw: random.Random, _: Sequence[str]) -> str:
    values = {
        "a": draw.randint(20, 400),
        "b": draw.randint(2, 20),
        "c": draw.randint(2, 12),
        "k": draw.randint(2, 12),
    }
    percent = draw.choice((5, 10, 20, 25, 40, 50))
    return draw.choice(SUMS).format(
        **values, p=percent, who=draw.choice(PEOPLE), things=draw.choice(THINGS)
    )


def _fact(draw: random.Random, _: Sequence[str]) -> str:
    subject, other = draw.sample(SUBJECTS, 2)
    return draw.choice(FACTS).format(subject=subject, other=other)


def _cut(text: str) -> str:
    """Return the text up to the last sentence that fits into a passage."""
    text = text.strip()
    if len(text) <= MAX_PASSAGE:
        return text
    short = text[:MAX_PASSAGE]
    end = max(short.rfind(mark) for mark in (". ", "! ", "? ", ".\n"))
    return short[: end + 1] if end > 0 else short


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.requests", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE.jsonl", help="file to write; an older one is replaced"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", required=True, help="text of `train data`"
    )
    parser.add_argument(
        "--target", metavar="MODEL", help="the model that wrote it (default: the embedded)"
    )
    parser.add_argument(
        "-n", "--count", type=int, default=2000, help="prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the draws (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    if args.file.suffix != ".jsonl":
        parser.error(f"FILE: got {args.file}, accepted a .jsonl file")
    corpus = Corpus.open(args.data)
    tokenizer = Engine.from_pretrained(args.target, policy="plain").tokenizer
    passages = [
        tokenizer.decode(text.tokens[text.answers].tolist(), skip_special_tokens=True)
        for text in corpus
    ]
    turns = requests(args.count, passages, args.seed)
    with atomic(args.file) as temporary:
        temporary.write_text(
            "".join(json.dumps({"turns": asked}) + "\n" for asked in turns), encoding="utf-8"
        )
    print(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
