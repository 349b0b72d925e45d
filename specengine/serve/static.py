"""The page at `/`: files of the package, with headers that let nothing else run and nothing be fetched."""

from collections.abc import Callable
from importlib import resources

from fastapi import FastAPI
from starlette.responses import Response

_FOLDER = resources.files("specengine.serve").joinpath("page")
_NAMES = sorted(file.name for file in _FOLDER.iterdir() if file.name.endswith((".css", ".js")))
FILES = {"/": "index.html"} | {f"/page/{name}": name for name in _NAMES}
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


def add_page(app: FastAPI) -> None:
    """Serve the files; they need no key, as they hold nothing that is not in the package."""
    for path, name in FILES.items():
        app.add_api_route(path, _serving(name), methods=["GET"], include_in_schema=False)


def _serving(name: str) -> Callable[[], Response]:
    content = _FOLDER.joinpath(name).read_bytes()
    kind = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"

    def serve() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return serve
