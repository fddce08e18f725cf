"""The page at `/`, for people: the files of `static`, and their Content-Security-Policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

_STATIC = Path(__file__).parent / "static"

# No content from other hosts, no scripts inside the HTML, and no text that becomes HTML.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{directive} {value}" for directive, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # so that after an upgrade all files are new
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files; `/` is index.html."""
    return [
        Route(f"/{path.name if path.name != 'index.html' else ''}", partial(_show, path), methods=["GET"])
        for path in sorted(_STATIC.iterdir())
    ]


async def _show(path: Path, _: Request) -> Response:
    return FileResponse(path, headers=_HEADERS)
