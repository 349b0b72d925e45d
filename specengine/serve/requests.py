"""What clients send: OpenAI's fields that this server honours, and vLLM's for what OpenAI has no field for.

Everything else is refused by name. `null` is the same as leaving a field out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_STRICT = ConfigDict(extra="forbid", strict=True)
MOST_STOPS, MOST_STOP_LETTERS = 16, 1000
MOST_LOGPROBS = 20


class StreamOptions(BaseModel):
    """`continuous_usage_stats`, vLLM's: usage in every chunk."""

    model_config = _STRICT
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class FunctionCall(BaseModel):
    """`arguments` is the text of a JSON object."""

    model_config = _STRICT
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError("accepted is the text of a JSON object")
        return text


class ToolCallGiven(BaseModel):
    """A call that the model made earlier in the conversation."""

    model_config = _STRICT
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """Fields beyond these may be there if they are empty, as clients send back what they were given."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCallGiven] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                raise ValueError(f"{name!r:.60} is not supported by this server")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("it has no content")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: arguments of calls parsed, developers are the system."""
        role = "system" if self.role == "developer" else self.role
        made: dict[str, Any] = {"role": role, "content": self.content if self.content is not None else ""}
        if self.tool_calls:
            calls = [call.model_dump() for call in self.tool_calls]
            for call in calls:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            made["tool_calls"] = calls
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        return made


class FunctionTool(BaseModel):
    """`parameters` is a JSON schema, which the arguments of a call meet if the tool is strict."""

    model_config = _STRICT
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = _STRICT
    type: Literal["function"]
    function: FunctionTool


class FunctionNamed(BaseModel):
    model_config = _STRICT
    name: str


class NamedChoice(BaseModel):
    """The one tool that the answer is a call of."""

    model_config = _STRICT
    type: Literal["function"]
    function: FunctionNamed


class JsonSchemaFormat(BaseModel):
    """`strict` has no effect: the answer always meets the schema. `description` is not shown to the model."""

    model_config = _STRICT
    name: str
    description: str | None = None
    given: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = _STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_named(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: accepted with type 'json_schema', and needed there")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Of GenerationOptions."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.given}
        return {"json_object": True} if self.type == "json_object" else {}


class Prediction(BaseModel):
    """OpenAI's Predicted Outputs: text that much of the answer is expected to be."""

    model_config = _STRICT
    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part["text"] for part in self.content)

    @field_validator("content")
    @classmethod
    def _is_text(cls, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        parts = [] if isinstance(content, str) else content
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            raise ValueError("accepted are a string or parts of type 'text'")
        return content


class Sampling(BaseModel):
    """Fields of both kinds of request. What is left out is the model's own default."""

    model_config = _STRICT
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1 are no limit")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    stop: str | list[str] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    user: str | None = Field(None, description="taken, and without effect")
    response_format: ResponseFormat | None = None
    grammar: str | None = Field(None, description="Lark or GBNF text that the answer meets")
    return_token_ids: bool | None = Field(None, description="vLLM's: the ids of the prompt and of the answer's tokens")
    return_cycles: bool | None = Field(None, description="in a stream: each cycle's tree, as trace files hold it")
    policy: Literal["plain"] | None = Field(None, description="plain: decode without the draft")

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > MOST_STOPS or not all(0 < len(text) <= MOST_STOP_LETTERS for text in stops):
            raise ValueError(f"accepted are up to {MOST_STOPS} strings of 1 to {MOST_STOP_LETTERS} characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _biases_of_tokens(cls, biases: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if not all(len(name) < 10 and name.isascii() and name.isdecimal() for name in biases or ()):
            raise ValueError("accepted are token ids as keys")
        return biases

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.return_cycles and not self.stream:
            raise ValueError("return_cycles: only with stream")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Of how many of the likeliest tokens, besides the one that was taken."""
        raise NotImplementedError


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_completion_tokens: max_tokens says something else; leave one of them out")
        if self.tool_choice is not None and not self.tools:
            raise ValueError("tool_choice: only with tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if isinstance(chosen := self.tool_choice, NamedChoice):
            known = [tool.function.name for tool in self.tools or []]
            if chosen.function.name not in known:
                raise ValueError(f"tool_choice: {chosen.function.name!r:.60} is not among the tools")
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
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]


class CompletionRequest(Sampling):
    """POST /v1/completions; prompt: a text or token ids, or a list of one of them."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0, description="0, the prompt alone, with echo")
    echo: bool | None = Field(None, description="with logprobs, those of the prompt's tokens too")
    best_of: Literal[1] | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    suffix: None = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) and len(prompt) > 1:
            raise ValueError(f"got {len(prompt)} prompts, accepted 1")
        return prompt

    @model_validator(mode="after")
    def _asks_for_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 only with echo")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def single(self) -> str | list[int]:
        """The prompt, out of a list of one."""
        first: Any = self.prompt[0] if isinstance(self.prompt, list) and self.prompt else None
        return first if isinstance(first, str | list) else self.prompt  # type: ignore[return-value]
