"""The HTTP application: OpenAI's endpoints, those that operators look at, and the page at `/`.

The page is files of the package, with headers that let nothing else run and nothing be fetched.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

import specengine
from specengine.protocol import ollama
from specengine.protocol.dialects import DIALECTS, Dialect
from specengine.protocol.problems import RequestError, of_error, of_validation
from specengine.protocol.settings import Settings
from specengine.serve.answering import add_streams, answered, json_response, loaded, require_ready
from specengine.serve.guards import ALIVE, HEALTH, METRICS, BodyRoute, Guard, refusal
from specengine.serve.models import Models, give_back
from specengine.serve.texts import add_texts
from specengine.serve.worker import Worker

_FOLDER = resources.files("specengine.serve").joinpath("page")
_FILE_NAMES = sorted(file.name for file in _FOLDER.iterdir() if file.name.endswith((".css", ".js")))
FILES = {"/": "index.html"} | {f"/page/{name}": name for name in _FILE_NAMES}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_app(models: Models) -> FastAPI:
    """Return the application. The workers of the models start and end with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for worker in models.workers.values():
            worker.thread.start()
        giving_back = asyncio.create_task(give_back())
        yield
        giving_back.cancel()
        for worker in models.workers.values():
            worker.stop()

    app = FastAPI(
        title="specengine",
        version=specengine.__version__,
        lifespan=lifespan,
        openapi_url=None,  # FastAPI would draw it between the steps of other answers
        docs_url=None,  # they would fetch scripts from elsewhere
        redoc_url=None,
        responses={"default": {"description": "refused or failed"}},
        middleware=middleware(models.settings, models.metrics.failed),
    )
    app.router.route_class = BodyRoute
    for path, name in FILES.items():
        app.routes.append(Route(path, _file(name), methods=["GET"], include_in_schema=False))
    _tell_problems(app, models)
    _operation(app, models)
    for path, dialect in DIALECTS.items():
        app.add_api_route(
            path,
            _endpoint(models, dialect),
            methods=["POST"],
            summary=dialect.about,
            responses={200: {"content": {dialect.reply.media_type: {"schema": {}}}}},
        )
    add_streams(app, models)
    add_texts(app, models)
    return app


def middleware(settings: Settings, failed: Any) -> list[Middleware]:
    """Return the middleware of every request; failed: a counter of refusals by status."""
    guard = Middleware(
        Guard, settings=settings, failed=failed, without_key=(*FILES, *HEALTH, *ALIVE)
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    return [*([cors] if settings.origins else []), guard]


def _file(name: str) -> Response:
    content, kind = _FOLDER.joinpath(name).read_bytes(), _TYPES[name.rpartition(".")[2]]
    return Response(content, headers=HEADERS, media_type=f"{kind}; charset=utf-8")


def _tell_problems(app: FastAPI, models: Models) -> None:
    def told(problem: RequestError, request: Request) -> Response:
        return refusal(problem, request.url.path, models.metrics.failed)

    @app.exception_handler(RequestError)
    @app.exception_handler(Exception)
    async def _problem(request: Request, error: Exception) -> Response:
        return told(of_error(error), request)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        given = getattr(getattr(request.scope.get("route"), "body_field", None), "field_info", None)
        fields = list(getattr(getattr(given, "annotation", None), "model_fields", ()))
        return told(of_validation(error.errors(), fields), request)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(
            error.__cause__, RequestError
        ):  # of a body, which FastAPI puts another error around
            return told(error.__cause__, request)
        message = str(error.detail)
        if error.status_code in (404, 405):
            routes = [
                f"{method} {route.path_format}"
                for route in app.routes
                if isinstance(route, APIRoute) and route.include_in_schema
                for method in sorted(route.methods or ())
            ]
            message = f"{request.method} {request.url.path:.100} is not here; there are {', '.join(routes)}"
        return told(RequestError(error.status_code, message, headers=error.headers), request)


async def alive(_: Request) -> Response:
    """Answer as long as the process does, also while the model is loaded, and say which version it is."""
    return json_response({"status": "ok", "version": specengine.__version__})


def _operation(app: FastAPI, models: Models) -> None:
    for path in ALIVE:
        app.add_api_route(path, alive, methods=["GET"], summary="200 from the start, the version")

    @app.get("/ready", summary="200 while requests are taken, else 503")
    @app.get("/health", summary="the same")
    async def health() -> Response:
        require_ready(models.first.state)
        return json_response({"status": "ok", "parallel": models.first.jobs.parallel})

    # in a thread
    app.add_api_route("/openapi.json", lambda: app.openapi(), include_in_schema=False)
    for path in HEALTH[2:]:
        app.add_api_route(path, health, methods=["GET"], include_in_schema=False)

    @app.get(
        METRICS,
        summary="For Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(models.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def described(worker: Worker) -> dict[str, Any]:
        require_ready(worker.state)
        return {
            "id": worker.settings.name,
            "object": "model",
            "created": started,
            "owned_by": "specengine",
            "max_model_len": worker.beside and worker.beside.max_context,
            "status": worker.status,
        }

    started = int(time.time())

    @app.get("/v1/models", summary="The models")
    async def listed() -> Response:
        return json_response(
            {"object": "list", "data": [described(one) for one in models.workers.values()]}
        )

    @app.get("/v1/models/{model:path}", summary="The model of that name")
    async def model(model: str) -> Response:
        return json_response(described(models.exactly(model)))


def _endpoint(models: Models, dialect: Dialect) -> Callable[..., Any]:
    async def answer(body: Any, request: Request) -> Response:
        if isinstance(body, ollama.ChatBody | ollama.GenerateBody) and ollama.is_empty(body):
            worker = models.named(body.model)
            await loaded(worker)
            return json_response(ollama.loaded(body, worker.settings.name))
        return await answered(models, dialect, body, request)

    answer.__annotations__ = {"body": dialect.given, "request": Request, "return": Response}
    return answer
