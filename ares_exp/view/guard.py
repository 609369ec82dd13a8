"""The guard of the server: only the browser that was given the token, and only from this page.

Other pages that a browser has open may send requests to a server of this machine, under a name of their own that leads
here, and other users of this machine may connect to it. So a request needs the exact `Host`, no foreign `Origin`, and
the token: in the first address, from then on in a cookie that no other site's request carries.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

COOKIE = "ares_exp_view_{}"
"""With the port: cookies are of a host, whatever listens there."""
TOKEN = "token"
NAMES = ("127.0.0.1", "localhost")
SAFE_SITES = ("same-origin", "none")
"""Values of `Sec-Fetch-Site`: from this page, or typed."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Guard:
    """The middleware.

    Attributes:
        policy: The content security policy of every answer.
        posted: The path where something may be posted; `None`: nothing can be changed.
        token: What the first address has.
        port: Where the server listens; known once it does.
    """

    policy: str
    posted: str | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    port: int = 0

    @property
    def address(self) -> str:
        """The first address, with the token."""
        return f"http://{NAMES[0]}:{self.port}/?{TOKEN}={self.token}"

    def middleware(self) -> Middleware:
        """Returns it for an application."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = self._refusal(request) or self._first(request) or await _handled(request, handler)
            answer.headers.update(HEADERS)
            answer.headers["Content-Security-Policy"] = f"{self.policy}; frame-ancestors 'none'"
            return answer

        return guarded

    def _refusal(self, request: web.Request) -> web.Response | None:
        hosts = [f"{name}:{self.port}" for name in NAMES]
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
        if request.headers.getall("Host", []) not in [[host] for host in hosts]:
            return _said(421, f"Expected a request to {hosts[0]}.")
        if origin is not None and origin not in [f"http://{host}" for host in hosts]:
            return _said(403, "Expected a request of this page, got one of another origin.")
        is_first = request.path == "/" and TOKEN in request.query
        if site is not None and site not in SAFE_SITES and not is_first:
            return _said(403, "Expected a request of this page, got one of another site.")
        if request.method not in ("GET", "HEAD") and (refusal := self._refused_change(request)) is not None:
            return refusal
        given = request.query.get(TOKEN, "") if is_first else request.cookies.get(COOKIE.format(self.port), "")
        if not secrets.compare_digest(given.encode(errors="replace"), self.token.encode()):
            return _said(401, "Expected the address that `ares-exp view` printed, with its token.")
        return None

    def _refused_change(self, request: web.Request) -> web.Response | None:
        """Refuses what is no order, and an order that does not say that it comes from this page."""
        if self.posted is None or request.method != "POST" or request.path != self.posted:
            return _said(405, "Nothing can be changed here.")
        if "Origin" not in request.headers:
            return _said(403, "Expected a request of this page, got one without an origin.")
        if request.content_type != "application/json":
            return _said(415, "Expected JSON.")
        return None

    def _first(self, request: web.Request) -> web.Response | None:
        """Answers the first address: the token goes into a cookie, and out of the address."""
        if TOKEN not in request.query:
            return None
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(COOKIE.format(self.port), self.token, httponly=True, samesite="Strict", path="/")
        return answer


async def _handled(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as refused:
        return _said(refused.status, refused.text or refused.reason)


def _said(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)
