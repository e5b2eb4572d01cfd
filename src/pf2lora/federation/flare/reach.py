"""The way to the server as gRPC takes it: directly, or through the HTTP proxy that the environment names."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from pf2lora.errors import UserError

PATIENCE = 10.0  # seconds for anybody to answer
PROXIES, EXCEPTIONS = ("grpc_proxy", "https_proxy", "http_proxy"), ("no_grpc_proxy", "no_proxy")
"""The variables that gRPC reads, in its order."""
LONGEST = 1 << 16  # bytes of a proxy's answer


def proxy_for(host: str) -> str | None:
    """The proxy that gRPC would call for a host."""
    proxy = next((os.environ[name] for name in PROXIES if os.environ.get(name)), None)
    without = next((os.environ[name] for name in EXCEPTIONS if os.environ.get(name)), "")
    ends = [end.strip().removeprefix("*") for end in without.split(",") if end.strip()]
    return None if any(host.endswith(end) for end in ends) else proxy


def connected(host: str, port: int) -> socket.socket:
    """A connection to the server, as plain TCP so far; an OSError, or a UserError where a proxy does not help."""
    proxy = proxy_for(host)
    if proxy is None:
        return socket.create_connection((host, port), timeout=PATIENCE)
    where = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    try:
        raw = socket.create_connection((where.hostname or "", where.port or 80), timeout=PATIENCE)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the proxy {where.hostname} of the environment ({', '.join(PROXIES)}) cannot be reached ({error}); "
            f"no_proxy={host} goes past it"
        ) from None
    try:
        raw.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < LONGEST:
            more = raw.recv(4096)
            if not more:
                break
            answer += more
        line = answer.split(b"\r\n")[0].decode("latin-1")
        if line.split(" ")[1:2] != ["200"]:
            raise UserError(
                f"the proxy {where.hostname} does not let {host}:{port} through ({line or 'no answer'}): ask for "
                f"CONNECT to that port, or no_proxy={host} goes past it"
            )
    except BaseException:
        raw.close()
        raise
    return raw
