"""A participant's figures for Prometheus, in its text format, made of the kit's own files whenever somebody looks.

They are of runs and connections: nothing of a row, of a label, or, at the server, of a single site's training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from pf2lora import __version__, atomic
from pf2lora.errors import UserError
from pf2lora.federation.protocol.run_status import ALIVE, Status, read_status

MOST = 20  # runs, the newest: each makes series of its own
HEARD = 60.0  # seconds within which a connected site was heard of
EVERY = 15.0  # seconds between two writings of a file
SUFFIX = ".prom"  # of a file for node_exporter's textfile collector
TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Participant:
    """Whose figures they are: the kit, and when its certificate ends (seconds since 1970)."""

    kit: Path
    name: str
    server: bool
    certificate_ends: float


def runs(kit: Path) -> dict[str, Status]:
    """Where the newest runs of a kit stand, the newest first."""
    found = {folder.name: read_status(folder) for folder in (kit / "runs").glob("*")}
    known = {name: status for name, status in found.items() if status is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1].time)[:MOST])


def connected(kit: Path) -> dict[str, float]:
    """When the server of this kit last heard of each site that is connected."""
    now = time.time()
    found: dict[str, float] = {}
    for file in sorted((kit / ALIVE).glob("*")):
        if "@" in file.name:  # a person
            continue
        with suppress(OSError):
            heard = file.stat().st_mtime
            found |= {file.name: heard} if now - heard < HEARD else {}
    return found


def exposition(who: Participant) -> str:
    """The figures as Prometheus reads them."""
    role = "server" if who.server else "site"
    lines = [
        *series(
            "info", "gauge", "who this is", [({"role": role, "name": who.name, "version": __version__}, 1)]
        ),
        *series(
            "certificate_expiry_timestamp_seconds",
            "gauge",
            "when the first of the kit's certificates ends",
            [({}, who.certificate_ends)],
        ),
    ]
    if who.server:
        there = connected(who.kit)
        lines += series("sites_connected", "gauge", f"sites heard of within {HEARD:g} s", [({}, len(there))])
        lines += series(
            "site_last_seen_timestamp_seconds",
            "gauge",
            "when a connected site was last heard of",
            [({"site": site}, heard) for site, heard in there.items()],
        )
    known = runs(who.kit)
    for name, kind, means, value in OF_A_RUN:
        if who.server or name not in OF_THE_SERVER:
            values = [({"run": run}, value(status)) for run, status in known.items()]
            lines += series(name, kind, means, [(labels, v) for labels, v in values if v is not None])
    states = [({"run": run, "state": status.state}, 1) for run, status in known.items()]
    lines += series("run_state", "gauge", "1 for the state that a run is in", states)
    return "\n".join(lines) + "\n"


OF_A_RUN: Sequence[tuple[str, str, str, Callable[[Status], float | None]]] = (
    ("round", "gauge", "the last finished round", lambda s: s.round),
    ("rounds", "gauge", "the rounds of the run", lambda s: s.rounds),
    (
        "training_loss",
        "gauge",
        "of the last round: at a site its own, at the server the mean of those told",
        lambda s: s.loss,
    ),
    ("round_seconds", "gauge", "the last round took, at a site its own work", lambda s: s.seconds),
    ("received_bytes_total", "counter", "of messages, since the job began", lambda s: s.received),
    ("sent_bytes_total", "counter", "of messages, since the job began", lambda s: s.sent),
    ("sites_present", "gauge", "sites that take part", lambda s: len(s.present)),
    ("sites_left_out", "gauge", "sites that are left out by what they said", lambda s: len(s.left_out)),
    (
        "run_problem",
        "gauge",
        "1 where the run waits, stopped or failed; status and logs say why",
        lambda s: s.state in ("waiting", "stopped", "failed"),
    ),
    ("run_updated_timestamp_seconds", "gauge", "when the run last said anything", lambda s: s.time),
)
"""A run's figures: name, kind, meaning, and how a status has it."""
OF_THE_SERVER = ("sites_present", "sites_left_out")


def series(
    name: str, kind: str, means: str, values: Sequence[tuple[Mapping[str, str], float]]
) -> Iterator[str]:
    """One metric with its values by labels; nothing where there are none."""
    if values:
        yield f"# HELP pf2lora_{name} {means}"
        yield f"# TYPE pf2lora_{name} {kind}"
    for labels, value in values:
        said = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
        yield f"pf2lora_{name}{f'{{{said}}}' if said else ''} {float(value)!r}"


def escaped(text: str) -> str:
    """A label's value, as the text format wants it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# --- where they are read -----------------------------------------------------------------------------------


@contextmanager
def published(where: str, text: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Serve the text over HTTP, where `where` is a port of this machine's loopback or HOST:PORT; or keep it in a file
    (`.prom`), which is gone at the end. What this gives is to be called now and then."""
    if where.endswith(SUFFIX):
        file, last = Path(where), 0.0
        atomic.write_text(file, text())
        file.chmod(0o644)  # the collector is another user

        def write() -> None:
            nonlocal last
            if time.monotonic() - last >= EVERY:
                last = time.monotonic()
                with suppress(OSError):  # a full disk is not worth the run
                    atomic.write_text(file, text())
                    file.chmod(0o644)

        try:
            yield write
        finally:
            file.unlink(missing_ok=True)
        return
    with listener(where, text) as server:
        Thread(target=server.serve_forever, name="pf2lora-metrics", daemon=True).start()
        try:
            yield lambda: None
        finally:
            server.shutdown()


def listener(where: str, text: Callable[[], str]) -> ThreadingHTTPServer:
    """An HTTP server that has `/metrics` and nothing else."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/metrics"
            body = text().encode() if found else b"/metrics is here\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Who looks is not written down."""

    host, port = address(where)
    try:
        return ThreadingHTTPServer((host, port), Page)
    except OSError as error:
        raise UserError(
            f"--metrics {where}: {host}:{port} cannot be used ({error.strerror}); choose another port"
        ) from None


def address(where: str) -> tuple[str, int]:
    """A port, or HOST:PORT."""
    host, colon, port = where.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536 or (colon and not host):
        raise UserError(
            f"--metrics is {where!r}; it takes a port (9464), HOST:PORT, or a file that ends in {SUFFIX}"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
