"""A parser whose complaints are one line, values checked while they are parsed, and arguments of several commands."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specengine import registry
from specengine.errors import NAMES, Declaration, declared_in, did_you_mean
from specengine.options import LoadOptions
from specengine.replicas import Scale
from specengine.request.declared import flags


class Parser(argparse.ArgumentParser):
    """Options are spelled out, mistakes end in one line, and `--debug` stands before or after the command."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("type", Path, named)
        self.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        self.set_defaults(loads=lambda arguments: None)
        self.modes: dict[str, Parser] = {}

    def add_mode(self, name: str, add: "Callable[[Parser], None]", text: str) -> None:
        """Add a flag with which the command does something else, by arguments of its own."""
        self.add_argument(name, action="store_true", help=text)
        self.modes[name] = Parser(prog=f"{self.prog} {name}", description=text)
        add(self.modes[name])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        for name, mode in self.modes.items():
            if name in args:
                return mode.parse_known_args([word for word in args if word != name], namespace)
        parsed, unread = super().parse_known_args(args, namespace)
        if "--config" in self._option_string_actions and parsed.config is not None:
            parsed, unread = super().parse_known_args(
                [*self._configured(parsed, args), *args], namespace
            )
        if unread:  # of this command: what stands after it is its own
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            meant = next(
                (text for word in unread if (text := did_you_mean(word.partition("=")[0], flags))),
                "",
            )
            self.error(f"unrecognized arguments: {' '.join(unread)}{meant}")
        return parsed, unread

    def _configured(self, parsed: argparse.Namespace, words: Sequence[str]) -> Iterator[str]:
        """Yield what a TOML file of options is on the command line, without the options that `words` have."""
        import tomllib

        try:
            values = tomllib.loads(parsed.config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            self.error(f"config: {parsed.config} cannot be read ({error})")
        # MODEL may stand there without its flag
        present = {word.partition("=")[0] for word in [*words, *["--model"] * bool(parsed.model)]}
        for name, value in values.items():
            if (action := self._option_string_actions.get(flag(name))) is None:
                meant = did_you_mean(flag(name), self._option_string_actions)
                self.error(f"config: {parsed.config}: unknown option {name!r}{meant}")
            if present.isdisjoint(action.option_strings):
                switch = flag(name if value else f"no_{name}")
                if action.nargs == 0 and isinstance(value, bool):
                    yield from [switch] * (switch in action.option_strings)
                else:
                    for each in value if isinstance(value, list) else [value]:
                        yield f"{flag(name)}={each}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if (
            value == []
        ):  # of an argument that may be left out, as argparse checks it up to Python 3.11
            return
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(
                str(value), [str(choice) for choice in action.choices or ()]
            )
            raise

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise what argparse drops where standard output cannot be written."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        file.write(message)
        file.flush()

    def error(self, message: str) -> NoReturn:
        self.exit(
            2,
            f"specengine: error: {' '.join(message.split())} ({self.prog} --help shows what is accepted)\n",
        )


def named(text: str) -> Path:
    """Return a path. An empty one, as of a variable that is not set, would mean the working folder."""
    if not text:
        raise argparse.ArgumentTypeError(
            "got an empty name, accepted a path; name a file or a folder (. is this one)"
        )
    return Path(text)


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected key=value")
    return key, value


def policy(text: str) -> str:
    """Return the name of a policy, NAME/PRESET, that of a plug-in, or FILE.py:CLASS; the last two are read later."""
    name = text if text.endswith(".py") else text.partition("/")[0]
    if not registry.is_file(text) and name not in POLICIES:
        known = (*POLICIES, *sorted(registry.plugins("specengine.policies")))
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"unknown name {name!r}, known are {', '.join(known)}{did_you_mean(name, known)}"
            )
    return text


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def declare(parser: argparse._ActionsContainer, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """Add arguments by name, each with what argparse's add_argument takes."""
    for name, options in arguments.items():
        parser.add_argument(name, **options)


def switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def number(
    text: str, default: float | None = None, kind: type = int, metavar: str = "N"
) -> dict[str, Any]:
    return {"type": kind, "default": default, "metavar": metavar, "help": text}


def file(text: str, metavar: str = "FILE") -> dict[str, Any]:
    return {"type": Path, "metavar": metavar, "help": text}


TRACE = file("write every cycle's tree, for `specengine trace`")


def add_options(parser: argparse.ArgumentParser, short: str, name: str) -> None:
    """Add a repeatable KEY=VALUE. The end of the help lists its keys."""
    parser.add_argument(
        short,
        f"--{name}",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="repeatable; listed below",
    )


DRAFTS = tuple(
    name
    for name in registry.names("specengine.drafters")
    if name not in ("dflash", "eagle", "lookup", "small_model")
)
POLICIES = (*registry.names("specengine.policies"), "plain")
LOADING = declared_in(LoadOptions)
OF_ACCESS = ("offline", "trust_remote_code")
OF_TARGETS = ("dtype", "device", "offline", "trust_remote_code")
OF_MODELS = (
    "dtype", "device", "backend", "quantize", "numerics", "pack", "graphs", "strict", "context", "tp_plan", "offline",
    "trust_remote_code",
)  # fmt: skip
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun sets it

PROMPT_FORMATS = (
    '.txt: a prompt per line; .jsonl: per line a string, {"prompt": ...} or {"turns": [...]}'
)


def add_model(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Add the target, and how it is loaded. positional: the model follows the command, without --model."""
    parser.set_defaults(loads=names_of)
    group = parser.add_argument_group("model")
    named: dict[str, Any] = {"nargs": "?", "metavar": "MODEL"} if positional else {}
    accepted = "a Hugging Face id, a local folder or a GGUF file (default: the embedded model)"
    group.add_argument("model" if positional else "--model", help=accepted, **named)
    add_declared(group, OF_MODELS)
    add_declared(group, ["threads"], declared_in(Scale))
    parser.set_defaults(tp_plan="auto" if RANKS > 1 else None)


def names_of(arguments: argparse.Namespace) -> str:
    """Return the names to announce before loading: the target, and a draft that is a model of its own."""
    from specengine.checkpoints import embedded

    target = (
        getattr(arguments, "model", None) or getattr(arguments, "target", None) or embedded.NAME
    )
    draft = getattr(arguments, "draft", None)
    return (
        target
        if draft in (None, "none", "plain", embedded.HEAD, *registry.names("specengine.drafters"))
        else f"{target}, {draft}"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the model to train for, and how it is loaded."""
    parser.set_defaults(loads=names_of)
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="a Hugging Face id or a local path (default: the embedded)",
    )
    add_declared(parser, OF_TARGETS)


def add_declared(
    parser: argparse._ActionsContainer,
    names: Iterable[str],
    options: Mapping[str, Declaration] = LOADING,
) -> None:
    """Add the flags of these options, by default of loading models."""
    for name in names:
        _add_flag(parser, options[name], default=options[name].default)


def add_draft_and_policy(
    parser: argparse.ArgumentParser, *, several_policies: bool = False
) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("draft and policy")
    add_draft(group)
    accepted = (
        ", ".join(POLICIES) + ", NAME/PRESET, a plug-in's name, or FILE.py:CLASS, whose code is run"
    )
    several: dict[str, Any] = {"action": "append"} if several_policies else {}
    text = f"{accepted} (default: the draft's){'; repeatable' * several_policies}"
    group.add_argument("--policy", type=policy, metavar="NAME", help=text, **several)
    _add_flag(group, LOADING["policy_options"], "-o")
    return group


def add_draft(parser: argparse._ActionsContainer) -> None:
    """Add the draft, without a policy."""
    parser.add_argument(
        "--draft",
        help=f"{', '.join(DRAFTS)}, none, default-head (the shipped one), the id or path of an EAGLE head or of a "
        "smaller model, a plug-in's name, or FILE.py:CLASS, whose code is run (default: the "
        "head that ships for the model, for what it is a fine-tune of, or is stored with it, else recycling)",
    )
    add_declared(parser, ["draft_options", "lookup"])


def add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    for declared in flags().values():
        _add_flag(group, declared)
    group.add_argument(
        "--system", metavar="TEXT", help="system message, for models with a chat template"
    )


def _add_flag(
    parser: argparse._ActionsContainer, declared: Declaration, *short: str, default: Any = None
) -> None:
    options: dict[str, Any] = {
        "type": declared.kind,
        "metavar": declared.metavar,
        "default": default,
    }
    if declared.choices:
        options["choices"] = declared.choices
    if declared.repeats:
        options |= {"action": "append", "default": [] if default == () else default}
    if declared.reader is NAMES:
        options |= {"type": key_value, "metavar": "KEY=VALUE", "action": "append", "default": []}
    if declared.kind is bool:
        action = "store_true" if declared.one_way else argparse.BooleanOptionalAction
        options = {"action": action, "default": declared.default}
    parser.add_argument(*short, flag(declared.dest), help=declared.help, **options)
