"""Endpoints that generate nothing: tokens of texts and prompts, and what Ollama and llama.cpp say of a model."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.responses import Response

import specengine
from specengine.engine import Engine
from specengine.errors import InputError, SpecEngineError, require, require_input
from specengine.protocol import anthropic, ollama
from specengine.protocol.dialects import DIALECTS, MESSAGES
from specengine.protocol.llamacpp import DetokenizeBody, TokenizeBody
from specengine.protocol.messages import Body
from specengine.protocol.preparing import CheckedRequest, ModelLimits
from specengine.protocol.problems import RequestError, of_error
from specengine.protocol.replies import TokenTexts
from specengine.protocol.requests import ChatRequest
from specengine.protocol.tools import format_of, tools_for
from specengine.request import prompts
from specengine.request.prompts import Room, require_tokens
from specengine.request.text import Decoder
from specengine.serve.answering import json_response, loaded, read_beside, require_ready
from specengine.serve.models import Models
from specengine.serve.worker import Worker

Result = TypeVar("Result")
EMBEDDINGS = ("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings")


async def read(worker: Worker, work: Callable[[Engine, ModelLimits], Result]) -> Result:
    """Return the result of `work`, in a thread, with a tokenizer apart from that of answers; RequestError."""
    engine, limits = await loaded(worker), worker.beside
    assert limits is not None

    def run() -> Result:
        with limits.lock:
            return work(engine, limits)

    try:
        return await asyncio.to_thread(run)
    except SpecEngineError as error:
        raise of_error(error) from error


def add_texts(app: FastAPI, models: Models) -> None:
    _tokens(app, models)
    _ollama(app, models)
    for path in EMBEDDINGS:
        app.add_api_route(path, refuse_embeddings, methods=["POST"], include_in_schema=False)

    @app.get("/props", summary="What llama.cpp's server says of a model")
    async def props(model: str | None = None) -> Response:
        worker = models.named(model)
        engine = await loaded(worker)
        tokenizer, context = engine.tokenizer, engine.target.max_context
        return json_response(
            {
                "default_generation_settings": {"n_ctx": context, "params": {}},
                "total_slots": worker.jobs.parallel,
                "model_alias": worker.settings.name,
                "model_path": engine.target.name,
                "chat_template": template_of(tokenizer),
                "bos_token": getattr(tokenizer, "bos_token", None),
                "eos_token": getattr(tokenizer, "eos_token", None),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"specengine {specengine.__version__}",
            }
        )


async def refuse_embeddings() -> Response:
    """Raise RequestError: a model that was trained to go on with texts makes poor embeddings."""
    raise RequestError(
        400,
        "embeddings are not offered: serve a model that was trained for them, such as with vLLM, Ollama or "
        "llama.cpp's `llama-server --embeddings`",
        code="unsupported",
    )


def _tokens(app: FastAPI, models: Models) -> None:
    @app.post("/tokenize", summary="Tokens of a text, as llama.cpp and vLLM do")
    async def tokenize(body: TokenizeBody) -> Response:
        return json_response(
            await read(
                models.named(body.model), lambda engine, limits: tokens_of(body, engine, limits)
            )
        )

    @app.post("/detokenize", summary="Text of tokens, as llama.cpp and vLLM do")
    async def detokenize(body: DetokenizeBody) -> Response:
        text = await read(
            models.named(body.model),
            lambda engine, limits: text_of_ids(body.tokens, engine, limits),
        )
        return json_response({"content": text, "prompt": text})

    @app.post("/apply-template", summary="The prompt of a conversation, as a text")
    async def apply_template(body: ChatRequest) -> Response:
        asked = await read_beside(body, lambda: CheckedRequest(body, models.settings))

        def prompt(engine: Engine, limits: ModelLimits) -> str:
            asked.require_possible(limits)
            return filled(body, limits)

        return json_response({"prompt": await read(models.named(body.model), prompt)})

    @app.post("/v1/messages/count_tokens", summary="Tokens of a conversation")
    async def count_tokens(body: anthropic.CountRequest) -> Response:
        counted = DIALECTS[MESSAGES].translated(body)
        asked = await read_beside(
            counted, lambda: CheckedRequest(counted, models.settings, renamed=anthropic.NAMES)
        )
        return json_response(
            {"input_tokens": len(await read(models.named(counted.model), asked.prompt_ids))}
        )


def tokens_of(body: TokenizeBody, engine: Engine, limits: ModelLimits) -> dict[str, Any]:
    """Return the answer to both kinds of request; InputError for texts that fit no context."""
    text = body.content if body.prompt is None else body.prompt
    if text is None:
        raise InputError("content: needed, or prompt")
    tokenizer, context = limits.tokenizer, engine.target.max_context
    Room(context, limits.longest).require(
        "content" if body.prompt is None else "prompt", [text], tokenizer
    )
    ends = body.add_special if body.add_special_tokens is None else body.add_special_tokens
    ends = body.prompt is not None if ends is None else ends
    options = {"split_special_tokens": True} if body.parse_special is False else {}
    ids = list(
        tokenizer(text.encode("utf-8", "replace").decode(), add_special_tokens=ends, **options)[
            "input_ids"
        ]
    )
    made: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": context}
    if body.with_pieces or body.return_token_strs:
        written = TokenTexts(tokenizer)
        pieces = [written.written(token).decode(errors="replace") for token in ids]
        if body.with_pieces:
            made["tokens"] = [
                {"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)
            ]
        if body.return_token_strs:
            made["token_strs"] = pieces
    return made


def text_of_ids(tokens: list[int], engine: Engine, limits: ModelLimits) -> str:
    """Return the text of tokens, special ones included; InputError for tokens that the model has not."""
    most = engine.target.max_context
    require("tokens", len(tokens), f"up to {most}, the context", len(tokens) <= most)
    require_tokens("tokens", tokens, engine.target.vocab_size)
    return Decoder(
        limits.tokenizer,
        [
            token
            for token in tokens
            if token in set(getattr(limits.tokenizer, "all_special_ids", ()))
        ],
    )(tokens)


def filled(request: ChatRequest, limits: ModelLimits) -> str:
    """Return the filled chat template; InputError where there is none, or it does not take these messages."""
    tokenizer = limits.tokenizer
    require_input("messages: this model has no chat template", bool(template_of(tokenizer)))
    messages = [message.for_template() for message in request.messages]
    options = {"add_generation_prompt": True} | request.template_options
    return prompts.filled(
        tokenizer, messages, tools_for(tokenizer, messages, request.template_tools), **options
    )


def template_of(tokenizer: Any) -> str:
    """Return the chat template, of several the one for chats without tools; an empty text where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    template = template.get("default") if isinstance(template, dict) else template
    return template if isinstance(template, str) else ""


class ModelNamed(Body, extra="ignore"):
    model: str | None = None
    name: str | None = None


def _ollama(app: FastAPI, models: Models) -> None:
    started = ollama.now()

    def described(worker: Worker) -> dict[str, Any]:
        require_ready(worker.state)
        target = getattr(worker.engine, "target", None)
        lm, name = getattr(target, "lm", None), worker.settings.name
        config = getattr(lm, "config", None)
        details = {
            "parent_model": "",
            "format": getattr(target, "backend", ""),
            "families": None,
            "family": str(getattr(config, "model_type", "")),
            "parameter_size": "",
            "quantization_level": "",
        }
        return {
            "name": name,
            "model": name,
            "modified_at": started,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "size": int(getattr(lm, "weight_bytes", 0)),
            "details": details,
        }

    @app.get("/api/version", summary="The version of Ollama whose API this is")
    async def version() -> Response:
        return json_response({"version": ollama.VERSION, "specengine": specengine.__version__})

    @app.get("/api/tags", summary="The models, as Ollama lists them")
    async def tags() -> Response:
        return json_response({"models": [described(worker) for worker in models.workers.values()]})

    @app.get("/api/ps", summary="The models that are loaded")
    async def running() -> Response:
        listed = [
            (described(worker), engine.target)
            for worker in models.workers.values()
            if (engine := worker.engine) is not None
        ]
        return json_response(
            {
                "models": [
                    known
                    | {
                        "expires_at": "2318-01-01T00:00:00Z",
                        "size_vram": known["size"] if target.device.type == "cuda" else 0,
                        "context_length": target.max_context,
                    }
                    for known, target in listed
                ]
            }
        )

    @app.post("/api/show", summary="A model, as Ollama shows it, which loads none")
    async def show(body: ModelNamed) -> Response:
        worker = models.named(body.model or body.name)
        known, limits = described(worker), worker.beside
        tokenizer = limits and limits.tokenizer
        family = known["details"]["family"] or "model"
        info = {
            "general.architecture": family,
            f"{family}.context_length": limits and limits.max_context,
            f"{family}.vocab_size": worker.engine and worker.engine.target.vocab_size,
        }
        return json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": template_of(tokenizer),
                "details": known["details"],
                "model_info": info,
                "capabilities": await asyncio.to_thread(_capabilities, tokenizer),
                "modified_at": known["modified_at"],
            }
        )


def _capabilities(tokenizer: Any) -> list[str]:
    found = ["completion"]
    with contextlib.suppress(RequestError):
        format_of(tokenizer)
        found.append("tools")
    return found + (["thinking"] if "enable_thinking" in template_of(tokenizer) else [])
