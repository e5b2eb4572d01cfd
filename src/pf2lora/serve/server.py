"""The server's process: where it listens, how much it lets in, and how it ends."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from pathlib import Path
from typing import ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pf2lora.errors import UserError, reading
from pf2lora.serve.service import Limits

GRACE = 10  # seconds that running requests have at the end


def listen(host: str, port: int) -> socket.socket:
    """The address, bound before the model is loaded: that somebody else has it is said at once. Port 0: a free one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {host}, port {port}: {reason} (--host, --port)") from None
    return bound


def check_tls(certificate: Path, key: Path) -> None:
    """A certificate and its key, tried before the model is loaded."""
    for path in (certificate, key):
        with reading(path), path.open("rb"):
            pass
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        raise UserError(f"{certificate} and {key} are no certificate and its key, in PEM ({error})") from None


def address_of(bound: socket.socket, host: str, *, tls: bool) -> str:
    """Where callers find it."""
    shown = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{shown}:{bound.getsockname()[1]}"


class Connection(H11Protocol):
    """Uvicorn's, which waits for a request as long as it takes to come; this one until `silence` seconds are over: for
    the head of a request as a whole, for its body from one piece to the next."""

    silence: ClassVar[float]
    ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.ending = self.loop.call_later(self.silence, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        being_read = self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete
        if self.ending is not None and (being_read or not incomplete):
            self.ending.cancel()
            self.ending = None
        if incomplete and self.ending is None:
            self.ending = self.loop.call_later(self.silence, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.ending is not None:
            self.ending.cancel()


def make_server(
    app: FastAPI, limits: Limits, certificate: Path | None = None, key: Path | None = None
) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=type("Connection", (Connection,), {"silence": limits.silence}),
        log_config=None,  # the process's logging is not the server's: setting it anew closes handlers of others
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(limits.silence),
        timeout_graceful_shutdown=GRACE,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    return uvicorn.Server(config)
