"""The HTTP application: OpenAI's endpoints, and those that operators look at."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response, StreamingResponse

import specengine
from specengine.errors import SpecEngineError, shown
from specengine.protocol import replies
from specengine.protocol.completion import Completion, Piece
from specengine.protocol.preparing import CheckedRequest
from specengine.protocol.problems import RequestError, json_response, of_error, of_validation, unavailable
from specengine.protocol.requests import ChatRequest, CompletionRequest, Sampling
from specengine.protocol.settings import Settings
from specengine.request.text import decoder
from specengine.serve import shapes
from specengine.serve.guards import HEALTH, BodyLimit, BodyRoute, Hosts, Keys
from specengine.serve.static import add_page
from specengine.serve.worker import DONE, PING, ClientGoneError, Ended, Failed, Waiting, Worker, events, sse

CLIENT_CLOSED_REQUEST = 499
_EVENTS = "text/event-stream"


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """Return the application. The worker starts and ends with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    app = FastAPI(
        title="specengine",
        version=specengine.__version__,
        lifespan=lifespan,
        docs_url=None,  # they would fetch scripts from elsewhere
        redoc_url=None,
        responses={"default": {"model": shapes.ErrorBody, "description": "refused or failed"}},
        middleware=middleware(settings, worker.metrics.failed),
    )
    app.router.route_class = BodyRoute
    add_page(app)
    _tell_problems(app, worker)
    _operation(app, worker, settings)
    _openai(app, worker, settings)
    return app


def middleware(settings: Settings, failed: Any) -> list[Middleware]:
    """Return the middleware of every request; failed: a counter of refusals by status."""
    made = []
    if settings.origins:
        headers = ["Authorization", "Content-Type"]
        made.append(
            Middleware(
                CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST"], allow_headers=headers
            )
        )
    if settings.api_keys:
        made.append(Middleware(Keys, keys=settings.api_keys, failed=failed))
    if settings.hosts:
        made.insert(0, Middleware(Hosts, names=settings.hosts, failed=failed))
    return [*made, Middleware(BodyLimit, most=settings.max_body_bytes, failed=failed)]


def _tell_problems(app: FastAPI, worker: Worker) -> None:
    def told(problem: RequestError, request: Request) -> Response:
        if request.url.path not in HEALTH:  # who asks whether requests are taken has made none
            worker.metrics.failed.labels(problem.status).inc()
        if problem.status == 429:
            problem.headers["Retry-After"] = str(worker.retry_seconds)
        return problem.response()

    @app.exception_handler(RequestError)
    async def _problem(request: Request, error: RequestError) -> Response:
        return told(error, request)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        model: type[BaseModel] = ChatRequest if "chat" in request.url.path else CompletionRequest
        return told(of_validation(error.errors(), list(model.model_fields)), request)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, RequestError):  # of a body, which FastAPI puts another error around
            return told(error.__cause__, request)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path:.100} is not here; there are {', '.join(_routes(app))}"
        return told(RequestError(error.status_code, message, headers=error.headers), request)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> Response:
        return told(of_error(error), request)


def _routes(app: FastAPI) -> list[str]:
    """Return method and path of each endpoint in /openapi.json."""
    return [f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods]


def _operation(app: FastAPI, worker: Worker, settings: Settings) -> None:
    health_says = shapes.answers(shapes.Health)

    @app.get("/health", summary="200 while requests are taken, else 503", responses=health_says)
    async def health() -> Response:
        _require_ready(worker)
        return json_response({"status": "ok"})

    for path in HEALTH:
        app.add_api_route(path, health, methods=["GET", "HEAD"], include_in_schema=False)

    text: dict[int | str, Any] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", summary="For Prometheus", response_class=Response, responses=text)
    async def metrics() -> Response:
        return Response(worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def described() -> dict[str, Any]:
        _require_ready(worker)
        assert worker.engine is not None
        context = worker.engine.target.max_context
        owner = {"object": "model", "created": started, "owned_by": "specengine"}
        return {"id": settings.name} | owner | {"max_model_len": context}

    started = int(time.time())

    @app.get("/v1/models", summary="The one model", responses=shapes.answers(shapes.Models))
    async def models() -> Response:
        return json_response({"object": "list", "data": [described()]})

    @app.get("/v1/models/{model:path}", summary="The model of that name", responses=shapes.answers(shapes.Model))
    async def model(model: str) -> Response:
        _require_model(model, settings)
        return json_response(described())


def _openai(app: FastAPI, worker: Worker, settings: Settings) -> None:
    async def answered(asked: Sampling, request: Request) -> Response:
        _require_ready(worker)
        if asked.model is not None and settings.strict_model:
            _require_model(asked.model, settings)
        names = None
        try:
            made = CheckedRequest(asked, settings)
            names = made.names
            return await _answered(worker, made, request)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except SpecEngineError as error:
            raise of_error(error, names) from error

    chat_says = shapes.answers(shapes.ChatAnswer, _EVENTS)

    @app.post("/v1/chat/completions", summary="Answer a conversation", responses=chat_says)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answered(body, request)

    text_says = shapes.answers(shapes.TextAnswer, _EVENTS)

    @app.post("/v1/completions", summary="Go on with a text", responses=text_says)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answered(body, request)


async def _answered(worker: Worker, asked: CheckedRequest, request: Request) -> Response:
    coming = events(worker, asked, request)
    try:
        if asked.request.stream:
            # A prompt that is refused is refused with a status: so what comes first is waited for, but not in silence.
            first = await anext(coming)
            if isinstance(first, Failed):
                raise of_error(first.error, asked.names)
            return StreamingResponse(_stream(worker, asked, first, coming), media_type=_EVENTS)
        return await _whole(worker, asked, coming)
    except BaseException:
        await coming.aclose()  # type: ignore[attr-defined]
        raise


async def _whole(worker: Worker, asked: CheckedRequest, coming: AsyncIterator[Any]) -> Response:
    async for event in coming:
        if isinstance(event, Failed):
            raise of_error(event.error, asked.names)
        if isinstance(event, Ended):
            await coming.aclose()  # type: ignore[attr-defined]
            reply = _reply(worker, asked)
            if isinstance(reply, replies.ChatReply):
                choice = reply.message(event.answer)
            else:
                choice = reply.message(event.answer, _echo(worker, asked, event.answer.prompt_ids))
            body = reply.whole(choice, event.answer)
            if asked.request.return_token_ids:
                body["prompt_token_ids"] = event.answer.prompt_ids
            return json_response(body)
    raise ClientGoneError


async def _stream(
    worker: Worker, asked: CheckedRequest, event: Any, coming: AsyncIterator[Any]
) -> AsyncIterator[bytes]:
    reply = _reply(worker, asked)
    begun = False
    try:
        while True:
            if event is None:
                yield PING
            elif isinstance(event, Waiting):
                yield b": %d before\n\n" % event.before
            elif isinstance(event, Failed):
                problem = of_error(event.error, asked.names)
                worker.metrics.failed.labels(problem.status).inc()
                yield sse(problem.body)
                return
            elif not begun:
                begun = True
                for chunk in _first_chunks(worker, asked, reply, event.answer):
                    yield sse(chunk)
                continue
            else:
                ended = isinstance(event, Ended)
                for chunk in _last_chunks(reply, event.answer) if ended else _piece_chunks(reply, event):
                    yield sse(chunk)
                if ended:
                    yield DONE
                    return
            event = await anext(coming)
    except ClientGoneError:
        return
    finally:
        await coming.aclose()  # type: ignore[attr-defined]


def _first_chunks(
    worker: Worker, asked: CheckedRequest, reply: replies.Reply, answer: Completion
) -> Iterator[dict[str, Any]]:
    for choice in reply.begin(_echo(worker, asked, answer.prompt_ids), answer):
        chunk = reply.chunk([choice], answer)
        if asked.request.return_token_ids:
            chunk["prompt_token_ids"] = answer.prompt_ids
        yield chunk


def _piece_chunks(reply: replies.Reply, piece: Piece) -> Iterator[dict[str, Any]]:
    extra = piece.extra
    for choice in reply.deltas(piece):
        yield reply.chunk([choice], piece.answer) | extra
        extra = {}
    if extra:
        yield reply.chunk([], piece.answer) | extra


def _last_chunks(reply: replies.Reply, answer: Completion) -> Iterator[dict[str, Any]]:
    choices = list(reply.last_deltas(answer))
    for choice in choices[:-1]:
        yield reply.chunk([choice], answer)
    yield reply.chunk(choices[-1:], answer) | {"timings": answer.timings}
    usage = reply.usage_chunk(answer)
    if usage is not None:
        yield usage


def _reply(worker: Worker, asked: CheckedRequest) -> replies.ChatReply | replies.TextReply:
    assert worker.engine is not None
    return replies.make(asked.request, asked.settings.name, worker.engine.tokenizer)


def _echo(worker: Worker, asked: CheckedRequest, prompt_ids: list[int]) -> str:
    if not replies.echoed(asked.request):
        return ""
    prompt = asked.request.single if isinstance(asked.request, CompletionRequest) else ""
    assert worker.engine is not None
    return prompt if isinstance(prompt, str) else decoder(worker.engine.tokenizer)(prompt_ids)


def _require_ready(worker: Worker) -> None:
    if worker.state != "ready":
        raise unavailable(worker.state)


def _require_model(name: str, settings: Settings) -> None:
    if name != settings.name:
        message = f"model: got {shown(name)}, this server has {settings.name!r}"
        raise RequestError(404, message, "model", "model_not_found")
