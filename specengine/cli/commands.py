"""The commands and their arguments: parsers alone, so that help and mistakes need neither torch nor transformers.

`add_NAME(parser)` adds the arguments of a command. `run` names the function that runs it, as `module:function`:
by default `run` in the command's module.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import specengine
from specengine.cli.parser import (
    OF_ACCESS,
    PROMPT_FORMATS,
    TRACE,
    Parser,
    add_declared,
    add_draft,
    add_draft_and_policy,
    add_generation,
    add_model,
    declare,
    file,
    names_of,
    number,
    switch,
)
from specengine.cli.train_arguments import add_train
from specengine.errors import declared_in
from specengine.protocol.settings import Settings
from specengine.replicas import Scale

RAW = switch("take prompts as they are, without the chat template")


def add_generate(parser: Parser) -> None:
    parser.set_defaults(parser=parser)
    declare(
        parser,
        {
            "prompt": {
                "nargs": "?",
                "metavar": "PROMPT",
                "help": "the prompt; - reads standard input, without its last line break",
            },
            "--prediction": file(
                "text that most of the answer should repeat, such as a file to change a little; makes the answer "
                "faster and never changes it"
            ),
        },
    )
    declare(
        parser.add_argument_group("output"),
        {
            "--raw": switch("take the prompt as it is, without the chat template"),
            "--stream": switch("print the answer piece by piece; Ctrl-C stops it"),
            "--show-draft": switch("colour what the draft proposed, in a terminal"),
            "--json": switch("print one JSON object: answer, token ids and figures"),
            "--trace": TRACE,
        },
    )
    declare(
        parser.add_mutually_exclusive_group(),
        {
            "--json-schema": file("the answer meets this JSON schema (needs llguidance)"),
            "--grammar": file("the answer meets this grammar, Lark or GBNF (needs llguidance)"),
        },
    )
    add_model(parser)
    add_declared(add_draft_and_policy(parser), ["memory", "memory_from"])
    add_generation(parser)


CHAT_COMMANDS = (
    "/help shows this, /reset starts over, /set shows and changes options, /stats shows speed and what drafts bring, "
    "/more or /continue goes on with an answer that was cut or stopped, /retry answers again, /undo takes a turn back, "
    "/save FILE and /load FILE keep the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer, // begins a "
    'message with a slash, """ begins and ends one of several lines'
)


def add_chat(parser: Parser) -> None:
    parser.epilog = f"{CHAT_COMMANDS}. If standard input is not a terminal, each line is a turn."
    declare(
        parser,
        {
            "--markdown": {
                "action": argparse.BooleanOptionalAction,
                "default": None,
                "help": "draw answers as Markdown, with whole words (default: in a terminal with colours, if the extra "
                "`chat` is installed)",
            },
            "--trace": TRACE,
        },
    )
    add_model(parser)
    add_declared(add_draft_and_policy(parser), ["learn", "memory", "memory_from"])
    add_generation(parser)


def add_check(parser: Parser) -> None:
    declare(
        parser,
        {
            "prompt": {
                "nargs": "*",
                "metavar": "PROMPT",
                "help": "default: a few built-in prompts",
            },
            "--prompts": file(PROMPT_FORMATS),
            "--limit": number("take the first N prompts"),
            "--raw": RAW,
            "--against": {
                "choices": ("plain", "huggingface"),
                "default": "plain",
                "help": "this engine's plain decoding (default) or transformers' generate (greedy only)",
            },
            "--tolerance": number(
                "largest logit gap of a near-tie (default: by dtype)", None, float, "LOGITS"
            ),
            "--json": switch("print one JSON object instead of the summary"),
            "--out": file("write the JSON object to a file as well"),
        },
    )
    add_model(parser)
    add_draft_and_policy(parser, several_policies=True)
    add_generation(parser)


SERVING = declared_in(Settings)
SCALE = declared_in(Scale)


def add_serve(parser: Parser) -> None:
    add_model(parser, positional=True)
    parser.set_defaults(loads=lambda _: None)  # said where the address is
    group = parser.add_argument_group("server")
    add_declared(group, ["host", "port", "unix_socket", "name", "api_keys"], SERVING)
    declare(
        group,
        {
            "--config": file("options in TOML, as port = 8001; the command line wins"),
            "--api-key-file": file(
                "file of such tokens, one a line, which nobody else should read; # begins a comment"
            ),
            "--model": {
                "action": "append",
                "default": [],
                "dest": "models",
                "metavar": "[NAME=]MODEL",
                "help": "another model, loaded when it is asked for, the first at the start without MODEL; repeatable",
            },
            "--chat-template": file(
                "a Jinja template for conversations, in place of the model's own"
            ),
        },
    )
    others = (
        "origins", "allowed_hosts", "strict_model", "allow_special_text", "log_level", "log_contents",
    )  # fmt: skip
    add_declared(group, others, SERVING)
    limits = (
        "parallel", "queue", "max_models", "max_model_memory", "max_body_bytes", "max_prompt_tokens", "max_tokens",
        "default_max_tokens", "max_seconds",
        "request_seconds", "keep_alive_seconds", "drain_seconds",
    )  # fmt: skip
    add_declared(parser.add_argument_group("limits"), limits, SERVING)
    add_declared(
        parser.add_argument_group("replicas"),
        ["replicas", "max_replicas", "address"],
        SCALE,
    )
    add_declared(add_draft_and_policy(parser), ["learn", "memory", "memory_from"])


def add_batch(parser: Parser) -> None:
    parser.set_defaults(goes_on="out", loads=lambda _: None)  # mistakes are reported before loading
    declare(
        parser,
        {
            "prompts": file(
                'a line is a string, {"prompt": ...}, {"messages": [...]}, {"turns": [...]} as in Spec-Bench, or a '
                'request of OpenAI\'s batches (custom_id, url, body); "id" and "options" are optional'
            ),
            "--out": file(
                "file for the answers, in the order of the prompts; figures go to NAME.stats.jsonl beside it. If the "
                "files exist, the run continues"
            )
            | {"required": True},
            "--raw": RAW,
        },
    )
    add_declared(parser, ["parallel"], SERVING)
    add_declared(parser.add_argument_group("replicas"), ["replicas", "address"], SCALE)
    add_model(parser)
    add_draft_and_policy(parser)
    add_generation(parser)


OF_TIMING = {
    "--max-new-tokens": number("longest answer, in tokens (default 128)", 128),
    "--rounds": number("rounds; figures are medians over them (default 3)", 3),
}


def add_demo(parser: Parser) -> None:
    declare(
        parser,
        {
            "--prompt": {
                "default": "Explain how a rainbow forms, and why its colours always stand in the same order.",
                "help": "default: a question about rainbows",
            },
            **OF_TIMING,
        },
    )
    add_model(parser)
    add_draft_and_policy(parser)
    parser.set_defaults(strict=None, run="specengine.cli.demo:run")  # strict where it can


def add_inspect(parser: Parser) -> None:
    declare(
        parser,
        {
            "--json": switch("print one JSON object"),
            "--ops": switch("list the backend of every op"),
            "--draft": {
                "metavar": "PATH",
                "help": "an EAGLE head: its layout, its tensors, and how often its first guess is the next token of "
                "--model",
            },
        },
    )
    add_declared(parser, ["draft_options"])
    add_model(parser)
    parser.set_defaults(
        run="specengine.cli.inspection:run",
        loads=lambda parsed: names_of(parsed) if parsed.model or parsed.draft else None,
    )


def add_calibrate(parser: Parser) -> None:
    declare(parser, {"--json": switch("print one JSON object, times in seconds")})
    add_model(parser)
    add_draft(parser.add_argument_group("draft"))
    parser.set_defaults(run="specengine.cli.doctor:run_calibrate")


def add_doctor(parser: Parser) -> None:
    add_calibrate(parser)
    parser.set_defaults(run="specengine.cli.doctor:run")
    parser.add_mode(
        "--inspect",
        add_inspect,
        "show versions, devices, backends, policies, drafts and, with --model and --draft, a model and an EAGLE head",
    )
    parser.add_mode(
        "--calibrate",
        add_calibrate,
        "measure how long verifying and drafting take here, by number of nodes, and keep it for policies that read it",
    )


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


def add_bench(parser: Parser) -> None:
    report = parser.add_subparsers(metavar="[report]", required=False).add_parser(
        "report", help=REPORT, description=REPORT
    )
    declare(
        report,
        {
            "file": file("file that --out wrote, one per run") | {"nargs": "+"},
            "--set": {"help": "the prompt set of the first table (default: all)"},
            "--plot": file("also draw each file's speeds (needs matplotlib)", "DIR"),
        },
    )
    report.set_defaults(run="specengine.cli.bench:run_report", goes_on="")
    parser.add_mode(
        "--demo", add_demo, "generate with and without speculation, and compare speed and tokens"
    )
    declare(
        parser.add_argument_group("what is measured"),
        {
            "--way": {"action": "append", "metavar": "WAY", "help": WAYS},
            "--prompts": file(
                '.jsonl with a {"question_id": ..., "category": ..., "turns": [...]} per line, as in Spec-Bench and '
                "SPEED-Bench, or a folder of such files; repeatable (default: six small sets that ship)"
            )
            | {"action": "append"},
            "--set-by": {
                "choices": ("file", "category", "sub_category", "difficulty"),
                "default": "file",
                "help": "what makes a set: each file, or this field of the lines (default: file)",
            },
            "--per-set": number("prompts per set, 0 for all (default 2)", 2),
            "--turns": number("turns per conversation (default 1)", 1),
            **OF_TIMING,
            "--temperature": {
                "type": float,
                "default": 0.0,
                "help": "0 is greedy (default); above 0 all ways sample",
            },
            "--seed": {
                "type": int,
                "default": 0,
                "help": "seed of the sampling noise, the same for every way (default 0)",
            },
            "--assistant": {
                "metavar": "MODEL",
                "help": f"id or path of the smaller model of way {ASSISTED}",
            },
            "--gguf": file("for peers (default: the model's own)"),
            "--peers": file(
                "the environments of the ways peer:... (default: .peers, where `make peers` of a checkout puts them)",
                "DIR",
            )
            | {"default": Path(".peers")},
            "--out": file("keep the records in this .jsonl; if it exists, the run continues"),
        },
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


def add_export(parser: Parser) -> None:
    declare(
        parser,
        {
            "head": {
                "metavar": "HEAD",
                "help": "path or Hub id of an EAGLE head, or default-head, which ships",
            },
            "folder": file("folder to write, new or empty", "FOLDER"),
            "--format": {
                "choices": FORMATS,
                "default": "speculators",
                "help": "speculators or vllm: vLLM and speculators read it, the target's name in it; eagle or sglang: "
                "SGLang, vLLM and the EAGLE repository do (default: speculators)",
            },
            "--target": {
                "metavar": "MODEL",
                "help": "a Hugging Face id or a local path, as engines will load it; its config.json is compared with "
                "the head (default: the embedded one for its own head; the eagle format needs none)",
            },
            "--tokens": number(
                "length of the chain that vLLM drafts when it is given the folder alone, for the speculators format "
                "(default: 3)"
            ),
        },
    )
    add_declared(parser, ["draft_options", *OF_ACCESS])


def add_trace(parser: Parser) -> None:
    declare(
        parser,
        {
            "file": file("traces; queries are numbered across all files") | {"nargs": "+"},
            "--query": number("show a cycle of the N-th query (default 1)"),
            "--cycle": number("show the N-th cycle (default 1)"),
            "--pruned": switch("give every pruned node a line of its own, or a box"),
            "--html": file("write a page that steps through the cycles; its name ends in .html"),
            "--tree": file("draw that cycle's tree; its name ends in .svg, .png or .pdf"),
        },
    )


# folders of the cache that can be made again, or missed
KEPT = "models", "costs", "downloads", "history", "memory"


def add_list(parser: Parser) -> None:
    declare(parser, {"--json": switch("print one JSON array, sizes in bytes")})
    parser.set_defaults(run="specengine.cli.storage:run_list")


def add_clean(parser: Parser) -> None:
    declare(
        parser,
        {
            "what": {
                "nargs": "*",
                "choices": KEPT,
                "metavar": "WHAT",
                "help": f"{', '.join(KEPT)} (default: all of these); heads and the Hub's models are left alone",
            },
            "--yes": switch("delete without asking"),
        },
    )
    parser.set_defaults(run="specengine.cli.storage:run_clean")


COMMANDS: dict[str, tuple[Callable[[Parser], None], str]] = {
    "generate": (add_generate, "answer one prompt"),
    "chat": (add_chat, "talk to a model, turn by turn"),
    "serve": (add_serve, "answer OpenAI's clients over HTTP"),
    "batch": (
        add_batch,
        "answer a file of prompts, one answer per line; an interrupted run continues where it stopped",
    ),
    "check": (
        add_check,
        "compare speculative decoding with plain decoding, token by token; exit status 1 on a mismatch",
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
    "train": (add_train, "train a draft for a model, on text that the model writes itself"),
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
