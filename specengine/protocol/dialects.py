"""The protocols that requests come in. Each is translated to one request, and the answer told in its own shapes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from specengine.protocol import anthropic, llamacpp, ollama, responses
from specengine.protocol.problems import of_validation
from specengine.protocol.replies import OpenAIReply, Reply
from specengine.protocol.requests import ChatRequest, CompletionRequest, Sampling


@dataclass(frozen=True)
class Dialect:
    """An endpoint that answers.

    given      its body
    translate  makes the request that the engine answers; its ValidationError is told in the client's names
    reply      shapes the answers: made of the body, that request, the model's name and its tokenizer
    names      the client's names of options and of fields of `translate`'s request, by the others
    about      for /openapi.json
    """

    given: type[BaseModel]
    translate: Callable[[Any], Sampling]
    reply: type[Reply]
    names: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def translated(self, body: BaseModel) -> Sampling:
        """Return the request; RequestError."""
        try:
            return self.translate(body)
        except ValidationError as error:
            problem = of_validation(error.errors(), list(self.given.model_fields))
            place = problem.param or ""
            field = re.split(r"[.\[]", place)[0]
            if field in self.names:
                problem.param = place.replace(field, self.names[field], 1)
                problem.args = (str(problem).replace(place, problem.param, 1),)
            raise problem from error


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
DIALECTS: dict[str, Dialect] = {
    CHAT: Dialect(ChatRequest, lambda body: body, OpenAIReply, about="Answer a conversation"),
    TEXT: Dialect(CompletionRequest, lambda body: body, OpenAIReply, about="Go on with a text"),
    RESPONSES: Dialect(
        responses.ResponsesRequest,
        responses.chat_of,
        responses.ResponsesReply,
        responses.NAMES,
        "Answer a conversation, as OpenAI's Responses",
    ),
    MESSAGES: Dialect(
        anthropic.MessagesRequest,
        anthropic.chat_of,
        anthropic.MessagesReply,
        anthropic.NAMES,
        "Answer a conversation, as Anthropic's Messages",
    ),
    "/api/chat": Dialect(
        ollama.ChatBody,
        ollama.chat_of,
        ollama.OllamaReply,
        ollama.NAMES,
        "Answer a conversation, as Ollama does",
    ),
    "/api/generate": Dialect(
        ollama.GenerateBody,
        ollama.generation_of,
        ollama.OllamaReply,
        ollama.NAMES,
        "Answer a text, as Ollama does",
    ),
    "/infill": Dialect(
        llamacpp.InfillBody,
        llamacpp.completion_of,
        llamacpp.InfillReply,
        llamacpp.NAMES,
        "Answer between two texts, as llama.cpp does",
    ),
    "/completion": Dialect(
        llamacpp.CompletionBody,
        llamacpp.completion_of,
        llamacpp.InfillReply,
        {"max_tokens": "n_predict", "max_new_tokens": "n_predict"},
        "Go on with a text, as llama.cpp does",
    ),
}
