"""The options of one generation, each declared once. Python, command line, server and batch read the declarations.

Imports neither torch nor transformers, because the command line's help reads it.
"""

# ruff: noqa: RUF009 (option returns dataclasses.field)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specengine.errors import (
    MAX_NUMBER,
    MAYBE,
    NAMES,
    TRUTH,
    Declaration,
    Reader,
    declared_in,
    number,
    option,
    reader,
    require,
    require_input,
    require_value,
    whole,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_MAX_NEW_TOKENS = 256
MIN_PENALTY = 1 / MAX_NUMBER  # logits divided by it stay finite


# ---- readers of lists and objects


def _several(accepted: str, kinds: Any, each: Reader, alone: type | tuple[()] = ()) -> Any:
    """Return the check of several values, which are of one of `kinds`; alone: the type of one that may stand alone."""

    def check(name: str, value: Any) -> None:
        require_value(name, value, accepted, isinstance(value, kinds))
        for item in [value] if isinstance(value, alone) else value:
            each.check(name, item)

    return check


_CALLABLES = Reader(
    _several(
        "a list of callables as in transformers",
        Iterable,
        reader("callables as in transformers", callable),
    )
)


def _check_config(name: str, value: Any) -> None:
    from transformers import GenerationConfig

    require(
        name,
        type(value).__name__,
        "a transformers.GenerationConfig",
        isinstance(value, GenerationConfig),
    )


# ---- declarations


@dataclass(frozen=True)
class RequestField:
    """An option's field in the body of a request to the server.

    name     by default the option's
    about    the field's description in the server's schema
    limits   narrower or wider than the reader's: the keywords ge, gt, le and lt
    read     makes the option's value of the field's; None leaves the option out
    written  whether protocol/requests.py writes this field out, because it is no plain value
    """

    name: str = ""
    about: str | None = None
    limits: Mapping[str, float] | None = None
    read: Callable[[Any], Any] | None = None
    written: bool = False


@functools.cache
def declarations() -> dict[str, Declaration]:
    """Return all declarations by name, in their order."""
    return declared_in(DeclaredOptions)


def flags() -> dict[str, Declaration]:
    """Return the declarations of the options that have a flag."""
    return {name: each for name, each in declarations().items() if each.help is not None}


def check(options: DeclaredOptions) -> None:
    """Raise InputError for a value that the reader of its option refuses, or for several constraints at once."""
    for name, declared in declarations().items():
        value = getattr(options, name)
        if declared.reader is not None and (value is not None or declared.reader is TRUTH):
            declared.reader.check(name, value)
    constraints = [name for name in CONSTRAINTS if getattr(options, name) not in (None, False)]
    require_input(f"{', '.join(constraints)}: accepted one of them", len(constraints) <= 1)


def _unless(value: Any) -> Callable[[Any], Any]:
    return lambda given: None if given == value else given


CONSTRAINTS = ("json_schema", "json_object", "grammar")


@dataclass
class DeclaredOptions:
    """Options of one generation, the keyword arguments of `Engine.generate`.

    None is taken from `generation_config`, then from the model's own. Numbers and lists may be numpy's and torch's.
    """

    # A new option is a field at the end of this file, with a text below it that says what it does.
    max_new_tokens: int | None = option(
        whole(1),
        help=f"tokens to generate at most (default {DEFAULT_MAX_NEW_TOKENS}; chat: to the context's end)",
        field=RequestField("max_tokens", written=True),
    )
    """tokens to generate at most; by default what max_length of a config leaves, else 256"""
    do_sample: bool | None = option(MAYBE)
    """sample instead of taking the most likely token. A temperature above 0 implies it, and so does a top_k, top_p,
    min_p or typical_p that truncates. True, here or in a config, draws from the 50 likeliest tokens where no top_k is
    given, as in transformers; implied sampling draws from all"""
    temperature: float | None = option(
        number(0, math.inf, "0 (greedy) or more"),
        neutral=(0, 1),
        help="0 is greedy, above 0 samples; top-k, top-p and min-p sample too (default: the model's)",
        field=RequestField(),
    )
    """0 means greedy, and so does less than 1e-5"""
    top_k: int | None = option(
        whole(0),
        neutral=(0, 50),
        help="sample from the K most likely tokens",
        field=RequestField(
            about="0 and -1 are no limit", limits={"ge": -1}, read=lambda count: max(count, 0)
        ),
    )
    """as in transformers; matters when sampling"""
    top_p: float | None = option(
        number(0, 1, "above 0, at most 1", open_low=True),
        neutral=(1,),
        help="sample from the most likely tokens that hold this probability",
        field=RequestField(),
    )
    """as in transformers; matters when sampling"""
    min_p: float | None = option(
        number(0, 1, "0 to 1"),
        neutral=(0,),
        help="sample from tokens of at least this share of the best one's probability",
        field=RequestField(),
    )
    """as in transformers; matters when sampling"""
    typical_p: float | None = option(
        number(0, 1, "above 0, at most 1", open_low=True), neutral=(1,), field=RequestField()
    )
    """as in transformers; matters when sampling"""
    repetition_penalty: float | None = option(
        number(MIN_PENALTY, math.inf, f"above 0, {MIN_PENALTY:g} to {MAX_NUMBER:g}"),
        help="penalty on tokens that occurred before, as in transformers; 1 is none",
        field=RequestField(limits={"ge": 0.01, "le": 100}),
    )
    """as in transformers"""
    presence_penalty: float = option(
        number(-math.inf, math.inf, "a finite number"),
        default=0.0,
        help="subtract this from the logit of every token generated before",
        field=RequestField(limits={"ge": -2, "le": 2}),
    )
    """the OpenAI definition: over generated tokens only"""
    frequency_penalty: float = option(
        number(-math.inf, math.inf, "a finite number"),
        default=0.0,
        help="subtract this from a token's logit once per occurrence in the answer",
        field=RequestField(limits={"ge": -2, "le": 2}),
    )
    """the OpenAI definition: over generated tokens only"""
    no_repeat_ngram_size: int | None = option(
        whole(0),
        help="let no sequence of this many tokens occur twice",
        field=RequestField(limits={"ge": 0, "le": 1 << 20}),
    )
    """as in transformers"""
    bad_words_ids: list[list[int]] | None = option()
    """as in transformers"""
    sequence_bias: Any = option(field=RequestField("logit_bias", written=True))
    """as in transformers"""
    suppress_tokens: list[int] | None = option()
    """as in transformers"""
    min_new_tokens: int | None = option(whole(0), field=RequestField("min_tokens", read=_unless(0)))
    """as in transformers"""
    seed: int | None = option(
        whole(0, (1 << 64) - 1),
        help="seed of the sampling noise; it gives the same answer with any draft and policy",
        field=RequestField(
            about="-1 is the same as leaving it out",
            limits={"ge": -1, "lt": 1 << 64},
            read=_unless(-1),
        ),
    )
    """of the sampling noise; the same seed gives the same answer, with any draft and policy. By default it is drawn
    from torch's global generator"""
    coupled: bool = option(
        TRUTH,
        default=True,
        help="let the draft of a sampled answer know the sampling noise; changes how many are accepted, not the answer",
    )
    """when sampling: drafts know the noise that the seed gives, so that they guess the draw itself. Never changes the
    answer; False for trees that do not depend on it, as the papers have them"""
    eos_token_id: int | list[int] | None = option(
        Reader(_several("a token id or a list of them", int | list | tuple, whole(0), int)),
        field=RequestField("ignore_eos", written=True),
    )
    """one id, or several; [] to ignore the model's own"""
    stop_strings: str | list[str] | None = option(
        Reader(
            _several(
                "a string or a list of strings",
                str | list | tuple,
                reader("non-empty strings", lambda text: isinstance(text, str) and bool(text)),
                str,
            ),
            str,
        ),
        help="end the answer with this text; repeatable",
        flag="stop",
        metavar="TEXT",
        repeats=True,
        field=RequestField("stop", written=True),
    )
    """the answer ends with the first of these strings, which it includes. The text of a special token is that token,
    which ends the answer and writes nothing"""
    max_time: float | None = option(number(0, math.inf, "above 0", open_low=True), line=False)
    """seconds after which the answer ends"""
    logits_processor: Iterable[Callable[..., Any]] | None = option(
        _CALLABLES, line=False, as_is=True
    )
    """as in transformers"""
    stopping_criteria: Iterable[Callable[..., Any]] | None = option(
        _CALLABLES, line=False, as_is=True
    )
    """as in transformers"""
    streamer: Any = option(
        reader(
            "one of transformers' streamers",
            lambda value: all(callable(getattr(value, method, None)) for method in ("put", "end")),
        ),
        line=False,
        as_is=True,
    )
    """as in transformers"""
    generation_config: GenerationConfig | None = option(
        Reader(_check_config), line=False, as_is=True
    )
    """as in transformers"""
    return_dict_in_generate: bool | None = option(MAYBE, line=False)
    """as in transformers"""
    raw: bool = option(TRUTH, default=False)
    """take a string prompt as it is, without the chat template"""
    allow_special_text: bool = option(
        TRUTH,
        default=True,
        help="read the text of special tokens in a prompt as those tokens, as transformers does (default), or as text",
        field=RequestField(written=True),
    )
    """the text of a special token in a prompt or a message is that token, as transformers reads it: a user who writes
    the template's markers opens a turn of another role. False, for text of people who are not trusted, takes it as text
    like any other"""
    json_schema: str | Mapping[str, Any] | None = option(as_is=True)
    """a JSON schema, as a dict or as JSON text, that the answer meets, written as json.dumps does. Refused where the
    library, llguidance, does not support all of it"""
    json_object: bool = option(TRUTH, default=False)
    """the answer is a JSON object of any kind"""
    grammar: str | None = option()
    """a grammar, as Lark or GBNF text, that the answer meets. The answer ends once nothing can follow it; cut short by
    max_new_tokens it is the beginning of an answer that meets the grammar"""
    prediction: str | list[int] | None = option()
    """text, or token ids, that much of the answer is expected to be: text that follows the same words in it is drafted.
    Never changes the answer; for the drafts that copy, ngram and any with lookup"""
    logprobs: int | None = option(whole(0), field=RequestField(written=True))
    """the log-probability of each token under the target's own distribution, before temperature and processors, and
    those of this many of the likeliest tokens at its place; 0 for its own alone"""
    policy: Any = option(field=RequestField(written=True), line=False, as_is=True)
    """for this answer alone: a policy's name, NAME/PRESET or a TreePolicy; by default the engine's own. `plain` decodes
    without the draft. A named policy keeps its state for later calls"""
    policy_options: Mapping[str, Any] | None = option(NAMES, line=False)
    """options of a policy given by name"""
