"""Arguments that several commands share, and what they become: engines, prompts, generation options."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specengine import policies
from specengine.cli.terminal import say
from specengine.engine import Engine, TextGeneration
from specengine.errors import InputError
from specengine.generation.options import DEFAULT_MAX_NEW_TOKENS
from specengine.generation.outputs import StreamPiece
from specengine.generation.prompts import Prompt
from specengine.trace import TraceWriter

SAMPLING_ONLY = ("top_k", "top_p", "min_p", "seed")

# name of the option in GenerationOptions, type, help
GENERATION_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("max_new_tokens", int, f"tokens to generate at most (default {DEFAULT_MAX_NEW_TOKENS})"),
    ("temperature", float, "0 is greedy, above 0 samples, as top-k, top-p and min-p do (default: the model's)"),
    ("top_k", int, "sample from the K most likely tokens"),
    ("top_p", float, "sample from the most likely tokens that hold this probability"),
    ("min_p", float, "sample from tokens of at least this share of the best one's probability"),
    ("repetition_penalty", float, "as in transformers; 1 is none"),
    ("presence_penalty", float, "subtracted from the logit of each token generated before"),
    ("frequency_penalty", float, "subtracted once per occurrence among the generated tokens"),
    ("no_repeat_ngram_size", int, "no sequence of this many tokens occurs twice"),
    ("seed", int, "of the sampling noise; the same seed gives the same answer with any draft and policy"),
)


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected key=value")
    return key, value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which target, and how it is loaded."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="a Hugging Face id, a local folder or a GGUF file (default: the embedded model)")
    group.add_argument("--dtype", default="auto", help="auto (as stored), bfloat16, float16 or float32")
    group.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    group.add_argument(
        "--backend",
        help="native (the C++ forward, on a CPU) or huggingface (its own modules) (default: native where it can)",
    )
    group.add_argument("--quantize", help="int8: keep a native model's weights as int8, half the memory of bfloat16")
    group.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="on a CPU, keep a second copy of bfloat16 weights that is faster (default: where it helps and fits)",
    )
    group.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run target and draft as CUDA graphs, captured once (default: on a CUDA device, where "
        "model and draft can)",
    )
    group.add_argument(
        "--compile-blocks",
        action="store_true",
        help="with --graphs, run the target's norms and feed-forward layers through torch.compile",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="the same bits in every tree and in plain decoding, in bfloat16 too; costs more per node",
    )
    group.add_argument("--offline", action="store_true", help="never use a network")
    group.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")


def add_draft_arguments(parser: argparse.ArgumentParser, *, several_policies: bool = False) -> None:
    group = parser.add_argument_group("draft and policy")
    add_draft(group)
    known = ", ".join(policies.names()) + ", or NAME/PRESET"
    if several_policies:
        group.add_argument("--policy", action="append", help=f"{known} (default: the draft's); repeatable")
    else:
        group.add_argument("--policy", help=f"{known} (default: the draft's)")
    group.add_argument(
        "-o",
        "--policy-option",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the policy named by --policy, repeatable; `specengine inspect` lists them",
    )


def add_draft(parser: argparse._ActionsContainer) -> None:
    """Which draft, without a policy."""
    parser.add_argument(
        "--draft",
        help="ngram, recycling, none, or the id or path of an EAGLE head or a smaller model with the same tokenizer "
        "(default: the shipped head for the default model, else recycling)",
    )
    add_draft_option(parser)
    parser.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="mix into the draft what followed the same words before in prompt and answer (default: on a CPU)",
    )


def add_draft_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--draft-option", type=key_value, action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    for name, kind, text in GENERATION_OPTIONS:
        group.add_argument(flag(name), type=kind, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer with this text; repeatable")
    group.add_argument(
        "--allow-special-text",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the text of special tokens in a prompt as those tokens, as transformers does; without, as text",
    )
    group.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")


def add_trace_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write every cycle's tree, for `specengine trace`")


def open_trace(arguments: argparse.Namespace, engine: Engine) -> contextlib.AbstractContextManager[TraceWriter | None]:
    return TraceWriter(arguments.trace, engine) if arguments.trace else contextlib.nullcontext()


def follow(
    generation: TextGeneration, trace: TraceWriter | None
) -> contextlib.AbstractContextManager[Iterator[StreamPiece]]:
    """The pieces of `generation`, which go into the trace as well where there is one."""
    return contextlib.closing(generation if trace is None else trace.follow(generation))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def load_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of Engine.from_pretrained that say how models are loaded."""
    names = (
        "dtype",
        "device",
        "graphs",
        "compile_blocks",
        "lookup",
        "backend",
        "quantize",
        "pack",
        "strict",
        "offline",
        "trust_remote_code",
    )
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def load_engine(arguments: argparse.Namespace) -> Engine:
    return Engine.from_pretrained(
        arguments.model,
        arguments.draft,
        arguments.policy,
        draft_options=dict(arguments.draft_option),
        policy_options=dict(arguments.policy_option),
        **load_options(arguments),
    )


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of Engine.generate; what was not given is left to the model's own defaults."""
    names = [name for name, _, _ in GENERATION_OPTIONS]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if not arguments.allow_special_text:
        given["allow_special_text"] = False
    if arguments.stop:
        given["stop_strings"] = arguments.stop
    if getattr(arguments, "raw", False):
        given["raw"] = True
    return given


def note_idle_options(arguments: argparse.Namespace, generation: TextGeneration) -> None:
    """Say which given options cannot matter because the answer is greedy."""
    idle = [flag(name) for name in SAMPLING_ONLY if getattr(arguments, name) is not None]
    if idle and not generation.options.samples:
        verb = "change" if len(idle) > 1 else "changes"
        say(f"specengine: note: decoding is greedy, so {', '.join(idle)} {verb} nothing; sample with --temperature 1")


def messages(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """The messages before the first turn."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def as_prompt(before: list[dict[str, str]], text: str, *, raw: bool) -> Prompt:
    """The turn `text` behind the messages before it; the bare text where there are none."""
    if before and raw:
        raise InputError("raw: system messages and further turns need the chat template, leave out --raw")
    return [*before, {"role": "user", "content": text}] if before else text


def read_prompt(given: str | None) -> str:
    """The prompt on the command line; `-`, or none with something piped in, reads standard input."""
    if given == "-" or (given is None and not sys.stdin.isatty()):
        try:
            return sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"prompt: standard input is not UTF-8 ({error.reason} at byte {error.start})") from error
    if given is None:
        raise InputError("prompt: none was given; pass one, or - to read it from standard input")
    return given
