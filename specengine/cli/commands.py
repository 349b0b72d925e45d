"""The commands and their arguments: parsers alone, so that help and mistakes need neither torch nor transformers.

`add_NAME(parser)` adds the arguments of a command. `run` names the function that runs it, as `module:function`:
by default `run` in the command's module.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import specengine
from specengine.cli.parser import (
    OF_ACCESS,
    PROMPT_FORMATS,
    Parser,
    add_declared,
    add_draft,
    add_draft_and_policy,
    add_generation,
    add_model,
    add_trace_file,
    names_of,
)
from specengine.cli.train_arguments import add_train
from specengine.errors import declared_in
from specengine.protocol.settings import Settings
from specengine.replicas import Scale


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the prompt; - reads standard input, without its last line break",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--raw", action="store_true", help="take the prompt as it is, without the chat template"
    )
    output.add_argument(
        "--stream", action="store_true", help="print the answer piece by piece; Ctrl-C stops it"
    )
    output.add_argument(
        "--show-draft", action="store_true", help="colour what the draft proposed, in a terminal"
    )
    output.add_argument(
        "--json", action="store_true", help="print one JSON object: answer, token ids and figures"
    )
    parser.add_argument(
        "--prediction",
        type=Path,
        metavar="FILE",
        help="text that most of the answer should repeat, such as a file to change a little; makes the answer faster "
        "and never changes it",
    )
    constrained = parser.add_mutually_exclusive_group()
    constrained.add_argument(
        "--json-schema",
        type=Path,
        metavar="FILE",
        help="the answer meets this JSON schema (needs llguidance)",
    )
    constrained.add_argument(
        "--grammar",
        type=Path,
        metavar="FILE",
        help="the answer meets this grammar, Lark or GBNF (needs llguidance)",
    )
    add_trace_file(output)
    add_model(parser)
    add_draft_and_policy(parser)
    add_generation(parser)


CHAT_COMMANDS = (
    "/help shows this, /reset starts over, /set shows and changes options, /stats shows speed and what drafts bring, "
    "/save FILE and /load FILE keep the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer, // begins a "
    'message with a slash, """ begins and ends one of several lines'
)


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{CHAT_COMMANDS}. If standard input is not a terminal, each line is a turn."
    parser.add_argument(
        "--markdown",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="draw answers as Markdown, with whole words (default: in a terminal with colours, if the extra `chat` is "
        "installed)",
    )
    add_trace_file(parser)
    add_model(parser)
    add_declared(add_draft_and_policy(parser), ["learn"])
    add_generation(parser)


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="default: a few built-in prompts"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=PROMPT_FORMATS)
    parser.add_argument("--limit", type=int, metavar="N", help="take the first N prompts")
    parser.add_argument(
        "--raw", action="store_true", help="take prompts as they are, without the chat template"
    )
    parser.add_argument(
        "--against",
        choices=("plain", "huggingface"),
        default="plain",
        help="this engine's plain decoding (default) or transformers' generate (greedy only)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="LOGITS",
        help="largest logit gap of a near-tie (default: by dtype)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the summary"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the JSON object to a file as well"
    )
    add_model(parser)
    add_draft_and_policy(parser, several_policies=True)
    add_generation(parser)


SERVING = declared_in(Settings)
SCALE = declared_in(Scale)


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser, positional=True)
    parser.set_defaults(loads=lambda _: None)  # said where the address is
    group = parser.add_argument_group("server")
    asked = ("host", "port", "name", "api_keys", "origins", "allowed_hosts", "strict_model")
    add_declared(group, asked, SERVING)
    group.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja template for conversations, in place of the model's own",
    )
    add_declared(group, ["allow_special_text", "log_contents"], SERVING)
    limits = (
        "parallel", "queue", "max_body_bytes", "max_prompt_tokens", "max_tokens", "default_max_tokens", "max_seconds",
        "request_seconds", "keep_alive_seconds", "drain_seconds",
    )  # fmt: skip
    add_declared(parser.add_argument_group("limits"), limits, SERVING)
    replicas = parser.add_argument_group("replicas")
    add_declared(replicas, ["replicas", "max_replicas", "threads", "address"], SCALE)
    add_declared(add_draft_and_policy(parser), ["learn"])


def add_learn(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(policy=None)
    parser.add_argument(
        "learn",
        type=Path,
        metavar="DIR",
        help="a folder that chat or serve filled with --learn DIR",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="N",
        help="to learn for; fewer once nothing helps (default 10)",
    )
    add_model(parser)
    add_draft(parser.add_argument_group("draft"))


def add_batch(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(goes_on="out", loads=lambda _: None)  # mistakes are reported before loading
    parser.add_argument(
        "prompts",
        type=Path,
        metavar="FILE",
        help='a line is a string, {"prompt": ...}, {"messages": [...]}, {"turns": [...]} as in Spec-Bench, or a '
        'request of OpenAI\'s batches (custom_id, url, body); "id" and "options" are optional',
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE",
        help="file for the answers, in the order of the prompts; figures go to NAME.stats.jsonl beside it. If the "
        "files exist, the run continues",
    )  # fmt: skip
    parser.add_argument(
        "--raw", action="store_true", help="take prompts as they are, without the chat template"
    )
    add_declared(parser, ["parallel"], SERVING)
    replicas = parser.add_argument_group("replicas")
    add_declared(replicas, ["replicas", "threads", "address"], SCALE)
    add_model(parser)
    add_draft_and_policy(parser)
    add_generation(parser)


PROMPT = "Explain how a rainbow forms, and why its colours always stand in the same order."


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, help="default: a question about rainbows")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="tokens to generate at most (default 128)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed rounds; the median counts (default 3)"
    )
    add_model(parser)
    add_draft_and_policy(parser)
    parser.set_defaults(strict=None)  # where it can


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ops", action="store_true", help="list the backend of every op")
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="an EAGLE head: its layout, its tensors, and how often its first guess is the next token of --model",
    )
    add_declared(parser, ["draft_options"])
    add_model(parser)
    parser.set_defaults(
        run="specengine.cli.inspection:run",
        loads=lambda parsed: names_of(parsed) if parsed.model or parsed.draft else None,
    )


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    add_doctor(parser)
    parser.set_defaults(run="specengine.cli.doctor:run_calibrate")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, times in seconds"
    )
    add_model(parser)
    add_draft(parser.add_argument_group("draft"))


REPORT = "print the tables of a file that `specengine bench --out` wrote"
PLAIN, ASSISTED = "plain", "assisted"
DEFAULT_WAYS = (PLAIN, "auto", "generate", "prompt-lookup")
BASELINES = {
    "generate": "transformers' generate",
    "generate-compiled": "the same with a static cache, compiled",
    "prompt-lookup": "its prompt lookup",
    ASSISTED: "its assisted decoding by --assistant",
}
WAYS = (
    "POLICY or DRAFT:POLICY with ,option=value behind it, as talon/cpu,mu=0.05, ngram:eagle or file.py:Class; or "
    + ", ".join(f"{name} ({what})" for name, what in BASELINES.items())
    + "; or peer:ENGINE[/MODE], another engine in an environment of its own"
    + f"; repeatable. {PLAIN} decoding always takes part (default: {', '.join(DEFAULT_WAYS)})"
)


def add_bench(parser: argparse.ArgumentParser) -> None:
    report = parser.add_subparsers(metavar="[report]", required=False).add_parser(
        "report", help=REPORT, description=REPORT
    )
    report.add_argument(
        "file", nargs="+", type=Path, metavar="FILE", help="file that --out wrote, one per run"
    )
    report.add_argument("--set", help="the prompt set of the first table (default: all)")
    report.add_argument(
        "--plot", type=Path, metavar="DIR", help="also draw each file's speeds (needs matplotlib)"
    )
    report.set_defaults(run="specengine.cli.bench:run_report", goes_on="")
    group = parser.add_argument_group("what is measured")
    group.add_argument("--way", action="append", metavar="WAY", help=WAYS)
    group.add_argument(
        "--prompts", type=Path, action="append", metavar="FILE",
        help='.jsonl with a {"question_id": ..., "category": ..., "turns": [...]} per line, as in Spec-Bench and '
        "SPEED-Bench, or a folder of such files; repeatable (default: six small sets that ship)",
    )  # fmt: skip
    group.add_argument(
        "--set-by",
        choices=("file", "category", "sub_category", "difficulty"),
        default="file",
        help="what makes a set: each file, or this field of the lines (default: file)",
    )
    group.add_argument(
        "--per-set", type=int, default=2, metavar="N", help="prompts per set, 0 for all (default 2)"
    )
    group.add_argument(
        "--turns", type=int, default=1, metavar="N", help="turns per conversation (default 1)"
    )
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="longest answer, in tokens (default 128)",
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="rounds; figures are medians over them (default 3)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 is greedy (default); above 0 all ways sample",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the sampling noise, the same for every way (default 0)",
    )
    group.add_argument(
        "--assistant", metavar="MODEL", help=f"id or path of the smaller model of way {ASSISTED}"
    )
    group.add_argument(
        "--gguf", type=Path, metavar="FILE", help="for peers (default: the model's own)"
    )
    group.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        default=Path(".peers"),
        help="the environments of the ways peer:... (default: .peers, where `make peers` of a checkout puts them)",
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="keep the records in this .jsonl; if it exists, the run continues",
    )
    add_model(parser)
    add_draft(parser.add_argument_group("draft"))
    parser.set_defaults(goes_on="out", loads=lambda _: None)  # mistakes are reported before loading


# Layout of the files by the name of the format or of the engine that reads it.
FORMATS = {
    "speculators": "speculators",
    "vllm": "speculators",
    "eagle": "official",
    "sglang": "official",
}


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "head", metavar="HEAD", help="path or Hub id of an EAGLE head, or default-head, which ships"
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write, new or empty")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="speculators",
        help="speculators or vllm: vLLM and speculators read it, the target's name in it; eagle or sglang: SGLang, "
        "vLLM and the EAGLE repository do (default: speculators)",
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="a Hugging Face id or a local path, as engines will load it; its config.json is compared with the head "
        "(default: the embedded one for its own head; the eagle format needs none)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="length of the chain that vLLM drafts when it is given the folder alone, for the speculators format "
        "(default: 3)",
    )
    add_declared(parser, ["draft_options", *OF_ACCESS])


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="traces; queries are numbered across all files",
    )
    parser.add_argument(
        "--query", type=int, metavar="N", help="show a cycle of the N-th query (default 1)"
    )
    parser.add_argument("--cycle", type=int, metavar="N", help="show the N-th cycle (default 1)")
    parser.add_argument(
        "--pruned", action="store_true", help="give every pruned node a line of its own, or a box"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page that steps through the cycles; its name ends in .html",
    )
    parser.add_argument(
        "--tree",
        type=Path,
        metavar="FILE",
        help="draw that cycle's tree; its name ends in .svg, .png or .pdf",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        metavar="DIR",
        help="draw acceptance by depth and rank, its length, and drafting effort",
    )


KEPT = (
    "models",
    "costs",
    "downloads",
    "history",
)  # folders of the cache that can be made again, or missed


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.storage:run_list")
    parser.add_argument("--json", action="store_true", help="print one JSON array, sizes in bytes")


def add_clean(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="specengine.cli.storage:run_clean")
    parser.add_argument(
        "what", nargs="*", choices=KEPT, metavar="WHAT",
        help=f"{', '.join(KEPT)} (default: all of these); heads and the Hub's models are left alone",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="delete without asking")


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "generate": (add_generate, "answer one prompt"),
    "chat": (add_chat, "talk to a model, turn by turn"),
    "serve": (add_serve, "answer OpenAI's clients over HTTP, with one model"),
    "batch": (
        add_batch,
        "answer a file of prompts, one answer per line; an interrupted run continues where it stopped",
    ),
    "check": (
        add_check,
        "compare speculative decoding with plain decoding, token by token; exit status 1 on a mismatch",
    ),
    "inspect": (
        add_inspect,
        "show versions, devices, backends, policies, drafts and, with --model and --draft, a model and an EAGLE head",
    ),
    "calibrate": (
        add_calibrate,
        "measure how long verifying and drafting take here, by number of nodes, and keep it for policies that read it",
    ),
    "doctor": (
        add_doctor,
        "measure memory, forwards and drafts here, list what is missing, and say whether and why speculation pays",
    ),
    "bench": (
        add_bench,
        "measure policies and drafts beside transformers and other engines, on prompts of several kinds",
    ),
    "trace": (add_trace, "show the trees that `specengine generate --trace` wrote"),
    "demo": (add_demo, "generate with and without speculation, and compare speed and tokens"),
    "train": (add_train, "train a draft for a model, on text that the model writes itself"),
    "learn": (
        add_learn,
        "train the draft's head on the texts that chat and serve kept with --learn",
    ),
    "list": (
        add_list,
        "show the models, heads and measured costs that are kept on the disk, with their sizes",
    ),
    "clean": (add_clean, "delete what the cache folder holds, after saying what and asking"),
    "export": (add_export, "write an EAGLE head for vLLM, speculators or SGLang"),
}


def make_parser() -> Parser:
    """Return the parser. In its results `run` names the function to run; `loads` returns the model to load, if any."""
    parser = Parser(
        prog="specengine",
        description="Lossless tree speculative decoding for Hugging Face causal language models.",
    )
    parser.add_argument(
        "--version", action="version", version=f"specengine {specengine.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=f"specengine.cli.{name}:run")
        add(command)
    return parser
