"""Request fields: OpenAI's fields that this server honours, and vLLM's for what OpenAI has no field for.

Everything else is refused by name. `null` is the same as leaving a field out.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    create_model,
    field_validator,
    model_validator,
)

from specengine.protocol.messages import (
    TEXT_PARTS,
    Body,
    Content,
    Message,
    refuse,
    text_at,
    without_empty,
)
from specengine.request.declared import declarations

MAX_STOPS, MAX_STOP_LETTERS = 16, 1000
MAX_LOGPROBS = 20
MAX_TOKENS = (1 << 63) - 1
MAX_SEEDS = 1 << 64
MAX_ANSWERS, MAX_PROMPTS = 128, 1024  # of one request; the queue sets a lower limit
_SHORT = {  # fields that are one of structured_outputs
    "grammar": "grammar",
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
}
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
# Arguments of apply_chat_template that are none of the template's own.
NOT_OF_A_TEMPLATE = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
}  # fmt: skip


class StreamOptions(Body):
    """`continuous_usage_stats`, vLLM's: usage in every chunk. `include_obfuscation` has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class FunctionTool(Body, extra="allow"):
    """`parameters` is a JSON schema of an object, which the arguments of a call meet if the tool is strict; none, or
    {}, is a function without parameters. Fields beyond these go to the chat template."""

    name: str = Field(pattern=r"\S")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        kinds = (schema or {}).get("type", "object")
        problem = f"type: got {kinds!r:.60}, accepted 'object', because arguments are given by name"
        refuse({problem: "object" not in (kinds if isinstance(kinds, list) else [kinds])})
        return schema


class Tool(Body, extra="allow"):
    type: Literal["function"]
    function: FunctionTool


class FunctionNamed(Body):
    name: str


class NamedChoice(Body):
    """The one tool that the answer is a call of."""

    type: Literal["function"]
    function: FunctionNamed


class JsonSchemaFormat(Body):
    """`strict` has no effect: the answer always meets the schema. `description` is not shown to the model."""

    name: str
    description: str | None = None
    given: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`schema` next to the type, as llama.cpp's server and others have it, is that of the answer too."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    given: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _schema_where_named(self) -> Self:
        named, has_schema = self.json_schema is not None, self.given is not None
        typed = self.type == "json_schema"
        refuse(
            {
                "a json_schema is accepted with type 'json_schema', without another schema": named
                and (not typed or has_schema),
                "a json_schema is needed with type 'json_schema'": typed
                and not (named or has_schema),
                "a schema is accepted with type 'json_object' or 'json_schema'": has_schema
                and self.type == "text",
            }
        )
        return self

    @property
    def options(self) -> dict[str, Any]:
        schema = self.given if self.json_schema is None else self.json_schema.given
        if schema is not None:
            return {"json_schema": schema}
        return {"json_object": True} if self.type == "json_object" else {}


class StructuredOutputs(Body):
    """vLLM's: one of these constrains the answer."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        stated = [getattr(self, name) not in (None, False) for name in type(self).model_fields]
        none_of_them = self.model_fields_set and not any(stated)
        refuse(
            {
                "accepted one of json, regex, choice, grammar, json_object": none_of_them
                or sum(stated) > 1
            }
        )
        return self

    @property
    def options(self) -> dict[str, Any]:
        escapes = {"/": "\\/", "\n": "\\n"}
        grammars = [
            self.grammar,
            None
            if self.regex is None
            else _lark(
                f"/{_SLASH.sub(lambda match: escapes.get(match[0], match[0]), self.regex)}/"
            ),
            None
            if self.choice is None
            else _lark(" | ".join(json.dumps(text) for text in self.choice)),
        ]
        stated = {
            "json_schema": self.json_,
            "grammar": next((each for each in grammars if each is not None), None),
            "json_object": self.json_object or None,
        }
        return {name: value for name, value in stated.items() if value is not None}


def _lark(rule: str) -> str:
    return f"%llguidance {{}}\nstart: ANSWER\nANSWER: {rule}"


class Prediction(Body):
    """OpenAI's Predicted Outputs: text that much of the answer is expected to be."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return text_at("content", self.content, TEXT_PARTS, "text")


def only(kind: Any, accepted: Any, why: str) -> Any:
    """Return the type of a field that is taken at one value. why: of the refusal of others."""

    def check(value: Any) -> Any:
        refuse({why: value != accepted})
        return value

    return Annotated[kind, AfterValidator(check)]


def base_of(name: str, fields: Mapping[str, tuple[Any, str | None]]) -> Any:
    """Return a base of requests with these fields: a type besides None, and what to say of it in the API's schema.

    Most have no effect. They are declared so that values of another type are refused.
    """
    defined = {
        field: (kind | None, Field(None, description=about))
        for field, (kind, about) in fields.items()
    }
    return create_model(name, __base__=Body, **defined)  # type: ignore[call-overload]


# Fields that say something to the one who runs a server, and change no token of an answer.
Unread: Any = base_of(
    "Unread",
    {
        "store": (bool, None),
        "service_tier": (str, None),
        "safety_identifier": (str, None),
        "prompt_cache_key": (str, None),
        "prompt_cache_retention": (str, None),
        "prompt_cache_options": (dict[str, Any], None),
        "client_metadata": (dict[str, Any], None),
        "verbosity": (str, None),
        "priority": (int, "vLLM's"),
        "request_id": (str, "vLLM's"),
        "cache_prompt": (bool, "llama.cpp's; prefixes are always reused"),
        "id_slot": (int, "llama.cpp's"),
        "timings_per_token": (bool, "llama.cpp's; timings come with the last chunk"),
        "keep_alive": (str | int | float, "Ollama's"),
    },
)


class CommonFields(Unread):
    """Fields of all requests but Anthropic's and Ollama's. Responses repeat `user` and `metadata`."""

    model: str | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        None, description="for the chat template; none: without thoughts, if it can"
    )


class WithTools(BaseModel):
    """A request that may offer tools. Those of types that no client calls by a function are left out, with a note.

    notes: of what was left out
    """

    functions_are: ClassVar[Collection[str]] = ("function",)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @property
    def notes(self) -> list[str]:
        return self._notes

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: Any, described: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = described(core)  # in which tools may be of types that are left out
        tools = described.resolve_ref_schema(found)["properties"]["tools"]["anyOf"][0]
        other = {"properties": {"type": {"type": "string", "not": {"enum": [*cls.functions_are]}}}}
        tools["items"] = {
            "anyOf": [tools["items"], {"type": "object", "required": ["type"], **other}]
        }
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        tools = value.get("tools") if isinstance(value, dict) else None
        other = {
            at: kind
            for at, tool in enumerate(tools if isinstance(tools, list) else ())
            if isinstance(tool, dict)
            and isinstance(kind := tool.get("type"), str)
            and kind not in cls.functions_are
        }
        if other and isinstance(tools, list):
            value = {
                **value,
                "tools": [tool for at, tool in enumerate(tools) if at not in other] or None,
            }
        read_tool = read(value)
        read_tool._notes = [  # noqa: SLF001
            f"tools[{at}]: type {kind!r:.60} is left out, accepted functions"
            for at, kind in other.items()
        ]
        return read_tool


# Fields that are taken at the one value that changes nothing.
Neutral: Any = base_of(
    "Neutral",
    {
        "best_of": (Literal[1], None),
        "use_beam_search": (Literal[False], None),
        "length_penalty": (Literal[1], None),
        "skip_special_tokens": (Literal[True], None),
        "spaces_between_special_tokens": (Literal[True], None),
        "include_stop_str_in_output": (Literal[False], None),
        "modalities": (list[Literal["text"]], None),
        "functions": (NoneType, None),
        "audio": (NoneType, None),
        "web_search_options": (NoneType, None),
        "prompt_logprobs": (NoneType, None),
        "truncate_prompt_tokens": (NoneType, None),
    },
)


def _declared_fields() -> dict[str, Any]:
    """Return pydantic's fields of the options whose declaration has a plain one, by name."""
    fields = {}
    for declared in declarations().values():
        if (api_field := declared.field) is None or api_field.written or declared.reader is None:
            continue
        limits: Mapping[str, Any] = (
            declared.reader.limits if api_field.limits is None else api_field.limits
        )
        kind: Any = declared.reader.kind
        annotation = (
            kind | None
            if api_field.read is None
            else Annotated[kind | None, AfterValidator(_if_any(api_field.read))]
        )
        fields[declared.field_name] = (
            annotation,
            Field(None, description=api_field.about, **limits),
        )
    return fields


def _if_any(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


Declared: Any = create_model("Declared", __base__=Body, **_declared_fields())


def declared_values(body: Any) -> dict[str, Any]:
    """Return the fields of declared options that a request of another protocol gives."""
    return {
        name: value for name in Declared.model_fields if (value := getattr(body, name)) is not None
    }


Guided: Any = base_of(
    "Guided",
    {
        "guided_json": (dict[str, Any] | str, "as structured_outputs.json"),
        "guided_regex": (str, "as structured_outputs.regex"),
        "guided_choice": (
            Annotated[list[str], Field(min_length=1, max_length=1024)],
            "as structured_outputs.choice",
        ),
        "guided_grammar": (str, "as structured_outputs.grammar"),
    },
)


class Sampling(Declared, CommonFields, Neutral, Guided):
    """Fields of both kinds of request. What is left out is the model's own default."""

    max_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="-1 is the same as leaving it out; 0, of a completion: take the prompt into the cache",
    )
    logit_bias: (
        dict[
            Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
        ]
        | None
    ) = Field(None, max_length=1024, description="by token ids")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    t_max_predict_ms: float | None = Field(
        None,
        description="llama.cpp's: after so many ms since the first token, an answer with a line break ends",
    )
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description="answers to each prompt")
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(None, description="Lark or GBNF text that the answer meets")
    structured_outputs: StructuredOutputs | None = None
    allow_special_text: bool | None = Field(
        None,
        description="whether the text of special tokens in the prompt is those tokens; by default in completions",
    )
    return_token_ids: bool | None = Field(
        None, description="vLLM's: the ids of the prompt and of the answer's tokens"
    )
    return_cycles: bool | None = Field(
        None, description="in a stream: each cycle's tree, as trace files hold it"
    )
    return_progress: bool | None = Field(
        None, description="llama.cpp's: in a stream, how much of the prompt has been read"
    )
    policy: Literal["plain"] | None = Field(None, description="plain: decode without the draft")

    @field_validator("max_tokens", "max_completion_tokens", check_fields=False)
    @classmethod
    def _none_by_minus_one(cls, value: int | None) -> int | None:
        return None if value == -1 else value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        longest = max(map(len, self.stops), default=0)
        of_streams = ("stream_options", "return_cycles", "return_progress")
        refuse(
            {
                f"stop: accepted up to {MAX_STOPS} strings of up to {MAX_STOP_LETTERS} characters": (
                    len(self.stops) > MAX_STOPS or longest > MAX_STOP_LETTERS
                )
            }
            | {
                f"{name}: only with stream": getattr(self, name) and not self.stream
                for name in of_streams
            }
        )
        return self

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stops if text]

    @property
    def constraints(self) -> dict[str, dict[str, Any]]:
        """Return the options that constrain the answer, by the field that asks for them."""
        stated = {
            name: value
            for name in ["response_format", "structured_outputs", *_SHORT]
            if (value := getattr(self, name)) is not None
        }
        for name in _SHORT.keys() & stated.keys():
            stated[name] = StructuredOutputs.model_validate({_SHORT[name]: stated[name]})
        return without_empty({name: value.options for name, value in stated.items()})

    def each(self) -> list[Self]:
        """Return a request for each answer that this one asks for, with seeds that follow on each other."""
        seeds = [
            self.seed if self.seed is None else (self.seed + more) % MAX_SEEDS
            for more in range(self.n or 1)
        ]
        return [self.model_copy(update={"n": None, "seed": seed}) for seed in seeds]

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """Return whether the answer repeats the prompt."""
        return False

    @property
    def wanted_logprobs(self) -> int | None:
        """Return how many of the likeliest tokens to report, besides the chosen one; None: none at all."""
        raise NotImplementedError


NeutralInChats: Any = base_of(
    "NeutralInChats",
    {
        "function_call": (Literal["none", "auto"], None),
        "echo": (Literal[False], None),
        "add_special_tokens": (Literal[False], None),
    },
)


class ChatRequest(WithTools, Sampling, NeutralInChats):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    tools: list[Tool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call of a tool")
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="given to the chat template"
    )
    continue_final_message: bool | None = Field(
        None, description="the answer goes on with the last message"
    )
    add_generation_prompt: bool | None = None
    separate_reasoning: bool | None = Field(
        None,
        description="false: thoughts between <think> and </think> stay in the content; else they are told apart",
    )

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        refuse({"got 0, accepted 1 or more": value == 0})
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        names = [tool.function.name for tool in self.tools or []]
        choice = self.tool_choice
        named = [choice.function.name] if isinstance(choice, NamedChoice) else []
        taken = sorted(NOT_OF_A_TEMPLATE.intersection(self.chat_template_kwargs or ()))
        refuse(
            {
                "max_completion_tokens: max_tokens has another value; leave one of them out": (
                    len(limits) > 1
                ),
                "tool_choice: only with tools": choice not in (None, "auto", "none") and not names,
                "top_logprobs: only with logprobs": self.top_logprobs and not self.logprobs,
                f"tool_choice: {' '.join(named)!r:.60} is not among the tools": (
                    not {*named} <= {*names}
                ),
                f"chat_template_kwargs.{' '.join(taken[:1])}: it is not a variable of the template": (
                    taken
                ),
                "continue_final_message: accepted without add_generation_prompt": (
                    self.continue_final_message and self.add_generation_prompt
                ),
            }
        )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.tools
        ]

    @property
    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template besides messages and tools."""
        generation, effort = self.add_generation_prompt, self.reasoning_effort
        ends = {} if generation is None else {"add_generation_prompt": generation}
        if self.continue_final_message:
            ends = {"continue_final_message": True, "add_generation_prompt": False}
        thinks: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            thinks = {"enable_thinking": False}
        return {**thinks, **(self.chat_template_kwargs or {}), **ends}


class Infill(NamedTuple):
    """Texts before and after the answer, and texts of other files: their names and contents."""

    prefix: str
    suffix: str
    others: tuple[tuple[str, str], ...] = ()


class CompletionRequest(Sampling):
    """POST /v1/completions; prompt: a text or token ids, or a list of them, each of which is answered."""

    prompt: str | list[int] | list[str] | list[list[int]]
    _infill: Infill | None = PrivateAttr(None)  # set by protocols that have further texts
    echo: bool | None = Field(None, description="with logprobs, those of the prompt's tokens too")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = Field(
        None, description="text behind the answer, for models with tokens for it"
    )
    add_special_tokens: Literal[True] | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        count, texts = len(self._prompts), all(isinstance(one, str) for one in self._prompts)
        refuse(
            {
                f"prompt: got {count} prompts, accepted up to {MAX_PROMPTS}": count > MAX_PROMPTS,
                "suffix: accepted without echo": self.suffix and self.echo,
                "suffix: accepted with prompts that are texts": self.suffix and not texts,
            }
        )
        return self

    def each(self) -> list[Self]:
        alone = [self.model_copy(update={"prompt": prompt}) for prompt in self._prompts]
        return [one for request in alone for one in super(CompletionRequest, request).each()]

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def infill(self) -> Infill | None:
        """Return the texts around the answer, where it is one between two texts."""
        return self._infill or (Infill(str(self.single), self.suffix) if self.suffix else None)

    def within(self, around: Infill) -> Self:
        """Return the same request for an answer between two texts, of which one may be empty."""
        copy = self.model_copy()
        copy._infill = around  # noqa: SLF001
        return copy

    @property
    def _prompts(self) -> list[Any]:
        several = (
            isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list)
        )
        return self.prompt if several else [self.prompt]  # type: ignore[return-value]

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def single(self) -> str | list[int]:
        """Return the prompt, out of a list of one."""
        prompt: str | list[int] = self._prompts[0]
        return prompt
