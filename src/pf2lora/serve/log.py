"""A line for each request: who asked which model for what, what came of it, and how long it took. No text, no token."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pf2lora.errors import LONGEST, one_line


class RequestLog:
    """Tells `tell` of every request when its answer has been sent. /health is asked too often to be told of."""

    def __init__(self, app: ASGIApp, tell: Callable[[str], None]) -> None:
        self.app, self.tell = app, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        begun, status = time.monotonic(), 500
        state = scope.setdefault("state", {})

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            return await self.app(scope, receive, noting)
        finally:
            path = scope.get("raw_path", b"").decode("ascii", "replace")  # as it was sent: blanks are %20
            asked = f"{scope['method']} {path}"[:LONGEST]
            who, model = state.get("holder", "-"), state.get("model", "-")
            now, seconds = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic() - begun
            self.tell(one_line(f"{now} {who} {asked} {model} {status} {seconds:.2f} s"))
