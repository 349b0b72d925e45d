"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from specengine import registry
from specengine.cli.arguments.parser import flag, key_value, one_of
from specengine.request.declared import Declaration, Flag, declarations

# As options and policies have them, which import torch; a test compares them.
DTYPES = ("auto", "bfloat16", "float16", "float32")
BACKENDS = ("native", "huggingface")
QUANTIZATIONS = ("int8",)
DRAFTS = tuple(name for name in registry.names("specengine.drafters") if name not in ("eagle", "lookup", "small_model"))
POLICIES = (*registry.names("specengine.policies"), "plain")
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun sets it

PROMPT_FORMATS = '.txt: a prompt per line; .jsonl: per line a string, {"prompt": ...} or {"turns": [...]}'


def add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Which target, and how it is loaded; positional: the model stands behind the command, without --model."""
    parser.set_defaults(loads=names_of)
    group = parser.add_argument_group("model")
    named: dict[str, Any] = {"nargs": "?", "metavar": "MODEL"} if positional else {}
    accepted = "a Hugging Face id, a local folder or a GGUF file (default: the embedded model)"
    group.add_argument("model" if positional else "--model", help=accepted, **named)
    add_weights(group)
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="native: the C++ forward, on a CPU; huggingface: its own modules (default: native where it can)",
    )
    group.add_argument(
        "--quantize", choices=QUANTIZATIONS, help="keep a native model's weights as int8, half the memory of bfloat16"
    )
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
        action=argparse.BooleanOptionalAction,
        default=False,
        help="the same bits in every tree and in plain decoding, in bfloat16 too; costs more per node",
    )
    group.add_argument(
        "--tp-plan",
        choices=("auto",),
        default="auto" if RANKS > 1 else None,
        help="split the model over the processes that torchrun started, by its own plan (default: under torchrun)",
    )
    add_access(group)


def names_of(arguments: argparse.Namespace) -> str:
    """What loading is announced as: the target, and a draft that is a model of its own."""
    from specengine.checkpoints import embedded

    target = getattr(arguments, "model", None) or getattr(arguments, "target", None) or embedded.NAME
    draft = getattr(arguments, "draft", None)
    return (
        target
        if draft in (None, "none", "plain", embedded.HEAD, *registry.names("specengine.drafters"))
        else f"{target}, {draft}"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """The model that is trained for."""
    parser.set_defaults(loads=names_of)
    parser.add_argument("--target", metavar="MODEL", help="a Hugging Face id or a local path (default: the embedded)")
    add_weights(parser)
    add_access(parser)


def add_weights(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: auto, as stored)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")


def add_access(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--offline", action="store_true", help="never use a network")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")


def add_draft_and_policy(parser: argparse.ArgumentParser, *, several_policies: bool = False) -> None:
    group = parser.add_argument_group("draft and policy")
    add_draft(group)
    known = ", ".join(POLICIES) + ", or NAME/PRESET"
    if several_policies:
        more: dict[str, Any] = {"action": "append", "help": f"{known} (default: the draft's); repeatable"}
    else:
        more = {"help": f"{known} (default: the draft's)"}
    group.add_argument("--policy", type=one_of(POLICIES), metavar="NAME", **more)
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
        help=f"{', '.join(DRAFTS)}, none, default-head (the shipped one), or the id or path of an EAGLE head or of a "
        "smaller model with the same tokenizer (default: the shipped head for the default model, else recycling)",
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


def add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    for declared in declarations().values():
        if declared.flag is not None:
            _add_flag(group, declared, declared.flag)
    group.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")


def _add_flag(group: argparse._ArgumentGroup, declared: Declaration, given: Flag) -> None:
    kind = declared.reader.kind if declared.reader is not None else str
    options: dict[str, Any] = {"type": kind, "metavar": given.metavar}
    if kind is bool:
        options = {"action": argparse.BooleanOptionalAction, "default": declared.default}
    elif given.repeats:
        options["action"] = "append"
    group.add_argument(flag(given.name or declared.name), help=given.help, **options)


def add_trace(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write every cycle's tree, for `specengine trace`")
