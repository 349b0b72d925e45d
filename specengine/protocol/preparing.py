"""From a request to a generation of the engine, answers between two texts (fill in the middle) included."""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specengine.errors import ContextLengthError, InputError, require
from specengine.protocol.messages import is_empty
from specengine.protocol.parts import THOUGHT_MARKS
from specengine.protocol.problems import RequestError, require_request
from specengine.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    Infill,
    NamedChoice,
    Sampling,
    Tool,
)
from specengine.protocol.settings import Settings
from specengine.protocol.tools import (
    CLOSING,
    MARKS,
    OPENING,
    Every,
    Hermes,
    OneCall,
    ToolReader,
    format_of,
    schemas_of,
    special_tokens,
    tools_for,
)
from specengine.request.declared import CONSTRAINTS, declarations
from specengine.request.grammars import MAX_SECONDS, STRICT, WRITTEN, Constraint, compiled
from specengine.request.options import GenerationOptions
from specengine.request.prompts import (
    Room,
    predicted_ids,
    require_tokens,
    texts_in,
    token_ids,
)
from specengine.request.text import Decoder

if TYPE_CHECKING:
    from specengine.engine import Engine


class FimTokens(NamedTuple):
    """Names of the tokens before the prefix, before the suffix, and before the answer.

    suffix_first: the suffix stands before the prefix
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False


# Qwen2.5-Coder and CodeGemma; StarCoder, Granite and others; SantaCoder; Code Llama; DeepSeek-Coder; Codestral;
# Seed-Coder; GLM-4.5; Falcon-H1
KNOWN = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),
    FimTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FimTokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
    FimTokens("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FimTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FimTokens("<|prefix|>", "<|suffix|>", "<|middle|>"),
)


class Repository(NamedTuple):
    """How a family writes other files in a prompt. Requests tell no name of the repository or of the current file.

    separator  the token before each file
    start      the token before the repository's name, and that name
    head       text before another file's content; {} is that file's name
    current    text before the current file
    within     what stands after the prefix's token: nothing, the current file's name, or all files
    """

    separator: str
    start: tuple[str, str] = ("", "")
    head: str = "{}\n"
    current: str = "filename\n"
    within: Literal["nothing", "name", "files"] = "nothing"


# By a token of the family: Qwen2.5-Coder, with the names of llama.cpp's server; StarCoder 2; CodeGemma; DeepSeek-Coder;
# Codestral. All others are written as llama.cpp's server writes them.
REPOSITORIES = {
    "<|file_sep|>": Repository("<|file_sep|>", ("<|repo_name|>", "myproject\n")),
    "<file_sep>": Repository("<file_sep>", ("<repo_name>", "myproject"), within="name"),
    "<|file_separator|>": Repository("<|file_separator|>"),
    "<｜fim▁hole｜>": Repository("", head="#{}\n", current=""),
    "[SUFFIX]": Repository("", ("", ""), "+++++ {}\n", "+++++ filename\n", "files"),
}
SNIPPETS = Repository("", ("<reponame>", "myproject\n"), "\n\n--- snippet ---\n\n", "")
# Tokens with which an answer between two texts ends as well as with the model's own.
_ENDS = [
    *("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<repo_name>"),
    *("<reponame>", "<|file_sep|>", "<file_sep>", "<|file_separator|>", "▁<EOT>", "<EOT>"),
]


def fim_tokens(tokenizer: Any) -> FimTokens:
    """Return the tokens of a model; RequestError where it has none that are known."""
    for tokens in KNOWN:
        if len(_ids(tokenizer, tokens[:3])) == sum(map(bool, tokens[:3])):
            return tokens
    message = "suffix: this model has no tokens for a text between two others (fill in the middle); leave it out"
    raise RequestError(400, message, "suffix", "unsupported_field")


def fim_prompt(around: Infill, tokenizer: Any) -> list[int]:
    """Return the ids of a prompt, in which special tokens stand only where they belong; RequestError."""
    tokens = fim_tokens(tokenizer)
    marks = _ids(tokenizer, [*tokens[:3], *REPOSITORIES, *_ENDS])

    def ids(name: str, written: str) -> list[int]:
        """Return a token, where the model has it, and the tokens of a text."""
        options = {"add_special_tokens": False, "split_special_tokens": True}
        texts = tokenizer(written, **options)["input_ids"] if written else []
        return [*([marks[name]] if name in marks else []), *texts]

    start = getattr(tokenizer, "bos_token_id", None)
    begins = getattr(tokenizer, "add_bos_token", False)
    outside: list[int] = [start] if start is not None and begins else []
    within: list[int] = []
    if around.others:
        form = next((REPOSITORIES[name] for name in REPOSITORIES if name in marks), SNIPPETS)
        files = within if form.within == "files" else outside
        files += ids(*form.start) if form.start[0] in marks else []
        for name, content in around.others:
            ends = "" if form.head.startswith("\n") or content.endswith("\n") else "\n"
            files += ids(form.separator, form.head.replace("{}", name) + content + ends)
        files += ids(form.separator, "")
        current = outside if form.within == "nothing" else within
        current += ids("", form.current)
    before = [*ids(tokens.prefix, ""), *within, *ids("", around.prefix)]
    after = ids(tokens.suffix, around.suffix)
    return [
        *outside,
        *(after + before if tokens.suffix_first else before + after),
        *ids(tokens.middle, ""),
    ]


def fim_ends(tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer between two texts, besides the model's own; none of them is plain text."""
    added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    plain = fim_tokens(tokenizer).prefix not in added  # then no marks are
    return [id for name, id in _ids(tokenizer, _ENDS).items() if plain or name in added]


def _ids(tokenizer: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the ids of those names that are tokens. Reading a whole vocabulary takes a tenth of a second."""
    read = getattr(tokenizer, "convert_tokens_to_ids", lambda _: None)
    ids = {name: read(name) for name in names if name}
    return {
        name: id
        for name, id in ids.items()
        if id is not None and tokenizer.convert_ids_to_tokens(id) == name
    }


QUICK_LETTERS, QUICK_MESSAGES = 1 << 15, 200


class ModelLimits(NamedTuple):
    """Limits of a loaded model for prompts, with a tokenizer for the thread that reads requests.

    longest: characters of the longest token, where they are known already
    lock: held while the tokenizer reads, where several threads share it
    """

    tokenizer: Any
    max_context: int
    longest: int | None = None
    lock: AbstractContextManager[Any] = nullcontext()


class PreparedRequest(NamedTuple):
    """A request of which everything has been read.

    shown: special tokens whose text the answer shows
    """

    prompt: list[int]
    options: GenerationOptions
    shown: list[int]
    constraint: Constraint | None


@dataclass(frozen=True)
class CheckedRequest:
    """One request, its options checked as far as they can be without the model.

    defaults: options of Engine.generate, for what the request does not say
    renamed: the client's names of options, by the engine's, where its protocol has others than OpenAI's
    """

    request: Sampling
    settings: Settings
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        most, requested = self.settings.max_tokens, self.request.wanted_tokens
        fits = most is None or requested is None or requested <= most
        require("max_new_tokens", requested, f"up to {most} on this server", fits)
        object.__setattr__(self, "options", _options(self.request))
        GenerationOptions.check(dict(self.options))

    @property
    def names(self) -> dict[str, str]:
        """Return the client's names of options and fields that the engine names differently."""
        chat = isinstance(self.request, ChatRequest)
        prompt, other = ("messages", "tools") if chat else ("prompt", "response_format")
        field = next(iter(self.request.constraints), other)
        return {
            "prompt": prompt,
            **dict.fromkeys(("json_schema", "json_object", "grammar"), field),
            **self.renamed,
        }

    @cached_property
    def conversation(self) -> Any:
        """Return the source of the prompt: messages as templates read them, a text, or token ids."""
        request = self.request
        if isinstance(request, ChatRequest):
            return [message.for_template() for message in request.messages]
        assert isinstance(request, CompletionRequest)
        return request.single

    @cached_property
    def letters(self) -> int:
        """Return the number of characters of the prompt's source, tools and template variables included."""
        return sum(
            map(len, texts_in([self.conversation, self._functions, self._template, self._around]))
        )

    @property
    def quick(self) -> bool:
        """Return whether preparing takes milliseconds, so that the answering thread can do it."""
        many = isinstance(self.conversation, list) and len(self.conversation) > QUICK_MESSAGES
        letters = self.letters + len(self.prediction or "")
        return letters <= QUICK_LETTERS and not (many and self.letters) and not self.constrains

    @property
    def constrains(self) -> bool:
        """Return whether there is a schema or a grammar to read."""
        request = self.request
        forced = (
            isinstance(request, ChatRequest)
            and bool(request.tools)
            and request.tool_choice != "none"
        )
        return bool(request.constraints) or forced

    @property
    def prediction(self) -> str | None:
        predicted = self.request.prediction if isinstance(self.request, ChatRequest) else None
        return None if predicted is None else predicted.text or None

    def require_possible(self, limits: ModelLimits) -> None:
        """Raise InputError for texts that no model of these limits can hold, before anything is read."""
        room = self._room(limits)
        room.require_possible("prompt", self.letters, limits.tokenizer)
        room.require_possible("prediction", len(self.prediction or ""), limits.tokenizer)

    def prepare(
        self, engine: "Engine", limits: ModelLimits, still_wanted: Callable[[], None] = lambda: None
    ) -> PreparedRequest:
        """Read everything, which may take seconds unless it is quick; InputError or RequestError.

        still_wanted: called now and then; what it raises comes out.
        """
        tokenizer = limits.tokenizer
        with limits.lock:
            ids = self.prompt_ids(engine, limits, still_wanted)
        most = self.settings.max_prompt_tokens
        if most is not None and len(ids) > most:
            raise ContextLengthError(
                f"prompt: it has {len(ids)} tokens, accepted at most {most} on this server",
                len(ids),
                most,
                most,
            )
        constrained = constraint_options(self.request, tokenizer)
        defaults = {
            name: value
            for name, value in self.defaults.items()
            if not (constrained and name in CONSTRAINTS)
        }
        options = defaults | self.options | constrained
        for name in ("logit_bias", "stop_token_ids"):
            require_tokens(
                name, map(int, getattr(self.request, name) or ()), engine.target.vocab_size
            )
        options |= self._ends(engine)
        maxima = (self.settings.default_max_tokens, self.settings.max_tokens)
        if self.request.wanted_tokens is not None or "max_new_tokens" not in options:
            options["max_new_tokens"] = (
                min(most for most in maxima if most is not None)
                if self.request.wanted_tokens is None
                else max(self.request.wanted_tokens, 1)  # reading a prompt chooses a token
            )
        if self.request.echoes and options["max_new_tokens"] == 1:
            options["policy"] = "plain"  # the draft would read the prompt for one token
        if self.prediction is not None:
            with limits.lock:
                self._room(limits, still_wanted).require("prediction", [self.prediction], tokenizer)
                options["prediction"] = predicted_ids(
                    self.prediction, tokenizer, engine.target.vocab_size
                )
        marks = (*THOUGHT_MARKS, *(MARKS if self._functions else ()))
        shown = special_tokens(tokenizer, marks) if isinstance(self.request, ChatRequest) else []
        if self._functions and getattr(self.request, "parallel_tool_calls", None) is False:
            options["stopping_criteria"] = [
                OneCall(
                    ToolReader(Every(), schemas_of(self._functions)),
                    Decoder(engine.tokenizer, shown),
                )
            ]
        target = engine.target
        checked = GenerationOptions.of(
            options, target.generation_config, len(ids), target.max_context
        )
        # as vLLM does, where transformers' generate would stop
        checked.stops_after = checked.min_new_tokens or 0
        still_wanted()
        return PreparedRequest(ids, checked, shown, engine.constraint(checked))

    @property
    def _functions(self) -> list[dict[str, Any]] | None:
        return self.request.template_tools if isinstance(self.request, ChatRequest) else None

    @property
    def _around(self) -> list[str] | None:
        """Return the texts around an answer that stands between two."""
        around = self.request.infill if isinstance(self.request, CompletionRequest) else None
        return (
            None
            if around is None
            else [around.suffix, *(text for other in around.others for text in other)]
        )

    @property
    def _template(self) -> dict[str, Any]:
        return self.request.template_options if isinstance(self.request, ChatRequest) else {}

    def _room(self, limits: ModelLimits, still_wanted: Callable[[], None] = lambda: None) -> Room:
        return Room(
            min(limits.max_context, self.settings.max_prompt_tokens or limits.max_context),
            limits.longest,
            still_wanted,
        )

    def prompt_ids(
        self, engine: "Engine", limits: ModelLimits, still_wanted: Callable[[], None] = lambda: None
    ) -> list[int]:
        """Return the tokens of the prompt; InputError or RequestError. still_wanted: as in `prepare`."""
        self.require_possible(limits)
        if self._functions:
            format_of(limits.tokenizer)
        tools = self._functions
        if isinstance(self.request, ChatRequest):
            tools = tools_for(limits.tokenizer, self.conversation, tools)
        room = self._room(limits, still_wanted)
        prompt = self.conversation
        if (
            isinstance(self.request, CompletionRequest)
            and (around := self.request.infill) is not None
        ):
            room.require("prompt", [around.prefix, *(self._around or ())], limits.tokenizer)
            prompt = fim_prompt(around, limits.tokenizer)
        live = self.request.allow_special_text
        if live is None:
            live = self.settings.allow_special_text or isinstance(self.request, CompletionRequest)
        return token_ids(
            prompt,
            limits.tokenizer,
            raw=True,
            vocab_size=engine.target.vocab_size,
            max_context=engine.target.max_context,
            allow_special_text=live,
            tools=tools,
            template=self._template,
            room=room,
        )

    def _ends(self, engine: "Engine") -> dict[str, Any]:
        """Return the tokens that end the answer, if they are not the model's own alone."""
        more = list(self.request.stop_token_ids or ())
        if isinstance(self.request, CompletionRequest) and self.request.infill is not None:
            more += fim_ends(engine.tokenizer)
        if not more:
            return {}
        config = engine.target.generation_config
        model_ends = None if config is None or self.request.ignore_eos else config.eos_token_id
        return {
            "eos_token_id": [
                *([model_ends] if isinstance(model_ends, int) else model_ends or []),
                *more,
            ]
        }


def _options(request: Sampling) -> dict[str, Any]:
    """Return the options of GenerationOptions that the request gives."""
    plain = [
        each
        for each in declarations().values()
        if each.field is not None and not each.field.written
    ]
    options = {
        each.name: value
        for each in plain
        if (value := getattr(request, each.field_name)) is not None
    }
    biases = [[[int(token)], float(bias)] for token, bias in (request.logit_bias or {}).items()]
    written = {
        "policy": request.policy,
        "stop_strings": request.stops or None,
        "eos_token_id": [] if request.ignore_eos else None,
        "logprobs": request.wanted_logprobs,
        "sequence_bias": biases or None,
    }
    return options | {name: value for name, value in written.items() if value is not None}


_TAG = re.compile(r"</?\w+>")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def constraint_options(request: Sampling, tokenizer: Any) -> dict[str, Any]:
    """Return the options that keep an answer to these fields; RequestError where the fields contradict each other.

    With tools, `response_format` is for the answer that calls none.
    """
    constraints = request.constraints
    if len(constraints) > 1:
        name, other = sorted(constraints)[:2]
        raise RequestError(
            400, f"{name}: {other} constrains the answer too; leave one of them out", name
        )
    schema = next(iter(constraints.values()), {})
    if not isinstance(request, ChatRequest):
        return schema
    formats = schema if "response_format" in constraints else {}
    calls = calls_grammar(
        request,
        tokenizer,
        {"type": "object"} if "json_object" in formats else formats.get("json_schema"),
    )
    if calls is not None and constraints.keys() - {"response_format"}:
        name = next(iter(constraints))
        raise RequestError(
            400,
            f"{name}: tool_choice, or a strict tool, constrains the answer too; leave one out",
            name,
        )
    return schema if calls is None else {"grammar": calls}


def calls_grammar(
    request: ChatRequest, tokenizer: Any, answer: Mapping[str, Any] | None = None
) -> str | None:
    """Return a Lark grammar of the calls that `tool_choice` and strict tools allow, or None where any text is allowed.

    In it arguments meet the schema of their tool; of a tool that is not strict, where that schema can be read.
    `required` is one call, unless the client says that there may be several. Text that is no call meets the schema
    `answer`, if there is one.
    """
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    elif not tools or choice == "none":
        return None
    hermes = isinstance(format_of(tokenizer), Hermes)
    if (
        choice in (None, "auto")
        and not any(tool.function.strict for tool in tools)
        and (answer is None or not hermes)
    ):
        return None
    require_request(
        "tool_choice" if choice not in (None, "auto") else "tools",
        f"calls can be forced, and kept to their schema, where they are written as {Hermes.title}",
        hermes,
        "unsupported_field",
    )
    added = tokenizer.get_added_vocab()
    opening, closing = (tag if tag in added else json.dumps(tag) for tag in (OPENING, CLOSING))
    end = time.monotonic() + MAX_SECONDS
    rules = [f"body: ({' | '.join(f'call_{index}' for index in range(len(tools)))}) {closing}"]
    rules += [f"call_{index}: {_call(tool, end)}" for index, tool in enumerate(tools)]
    if isinstance(choice, NamedChoice):
        rules.append(f"start: {opening} body")
    elif choice == "required" or answer is not None:
        free, several = choice != "required", request.parallel_tool_calls
        more = f'("\\n" {opening} body)*' if several or (free and several is None) else ""
        text_schema = json.dumps({**(answer or {}), "x-guidance": WRITTEN | STRICT})
        rules.append(f"start: {opening} body {more} {f'| %json {text_schema}' if free else ''}")
    elif OPENING in added:
        others = [
            token for token in added if _TAG.fullmatch(token) and token not in (OPENING, CLOSING)
        ]
        written = [token for token in others if token not in tokenizer.all_special_tokens]
        between = f"(({' | '.join(written)}) TEXT?)*" if written else ""
        rules += [f"start: (text {opening} body)* text", f"text: TEXT? {between}"]
        rules.append(f"TEXT: /(.|\\n)+/ & ~/(.|\\n)*{OPENING}(.|\\n)*/")
    else:
        rules += ["start: (opened body)* TEXT", f"opened[lazy]: TEXT {opening}", "TEXT: /(.|\\n)*/"]
    return "\n".join(["%llguidance {}", *rules])


def _call(tool: Tool, end: float) -> str:
    function = tool.function
    schema = (
        NO_ARGUMENTS
        if is_empty(function.parameters)
        else (function.parameters or {}) | {"type": "object"}
    )
    if not function.strict and not _readable(schema, end):
        schema = {"type": "object"}
    name = json.dumps(function.name, ensure_ascii=False)
    head = json.dumps(f'\n{{"name": {name}, "arguments": ', ensure_ascii=False)
    arguments = json.dumps(schema | {"x-guidance": WRITTEN})
    return rf'{head} %json {arguments} "}}\n"'


def _readable(schema: dict[str, Any], end: float) -> bool:
    """Return whether the schema is accepted; RequestError where it, or those before it, take longer than to `end`."""
    try:
        compiled("json_schema", schema)
    except InputError:
        if time.monotonic() > end:
            raise RequestError(
                400, f"tools: reading their schemas takes more than {MAX_SECONDS:g} s", "tools"
            ) from None
        return False
    return True
