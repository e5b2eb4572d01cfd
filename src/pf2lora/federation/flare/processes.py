"""Starting and stopping a participant from its kit, and what is checked before."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pf2lora.errors import UserError
from pf2lora.federation import require_nvflare
from pf2lora.federation.flare.child import PARENT
from pf2lora.federation.kit import Kit
from pf2lora.parsing import read_json

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

EXPIRING = 30  # days before its end in which a certificate is spoken of
ERRORS, REFUSED = (
    "error_log.txt",
    "registration rejected",
)  # FLARE's, in a kit, and what it says there when it was refused
STOP_TIMEOUT = 10.0  # seconds between asking a process to stop and making it
ENGINE = {
    "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "5",  # a job's end does not wait 900 s for a site that is gone
    "MALLOC_ARENA_MAX": "2",  # else each of FLARE's threads keeps memory of its own for what it handled last
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),  # x is given back when it is freed; else it stays, in pieces
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}


class Running(UserError):
    """A kit is in use."""


def read_kit(folder: Path) -> Kit:
    """A kit as it is, whatever the state of its certificate."""
    require_nvflare()
    for server, file in ((True, "fed_server.json"), (False, "fed_client.json")):
        path = folder / "startup" / file
        if path.is_file():
            settings = read_json(path)
            name = "server" if server else settings["client"]["fqsn"]
            host, port = settings["servers"][0]["service"]["target"].rsplit(":", 1)
            return Kit(folder.resolve(), name, server, host, int(port))
    raise UserError(
        f"{str(folder)!r} is no start-up kit of a server or a site: `pf2lora federation kit` or `provision` makes kits"
    )


def open_kit(folder: Path) -> Kit:
    """A kit, checked: complete, its certificates in date, its key readable by its owner only."""
    kit = read_kit(folder)
    certificates(kit)
    check_key(kit)
    return kit


def certificates(kit: Kit) -> tuple[Certificate, Certificate]:
    """A kit's certificate and its authority's; a UserError where one is missing or out of date."""
    from cryptography import x509

    found = []
    for path in (kit.certificate, kit.root):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            raise UserError(f"{path} is missing or damaged: ask for a new kit for {kit.name}") from None
        ends = certificate.not_valid_after_utc
        if ends < datetime.now(UTC):
            raise UserError(
                f"the certificate of {kit.name} ({path.name}) expired on {ends:%Y-%m-%d}: "
                f"make new kits with `pf2lora federation provision`, or renew this one (docs/federation.md)"
            )
        found.append(certificate)
    own, root = found
    return own, root


def check_key(kit: Kit) -> None:
    """A UserError where a kit's private key can be read by others."""
    if kit.key.exists() and stat.S_IMODE(kit.key.stat().st_mode) & 0o077:
        raise UserError(f"the private key {kit.key} can be read by others: chmod 600 it")


def certificate_ends(kit: Kit) -> datetime:
    """When the first of a kit's certificates ends."""
    return min(found.not_valid_after_utc for found in certificates(kit))


def days_left(kit: Kit) -> int:
    """Days until then."""
    return (certificate_ends(kit) - datetime.now(UTC)).days


def expiry_warning(kit: Kit) -> str | None:
    """A line about a certificate that ends soon; a UserError about one that has ended."""
    left = days_left(kit)
    if left >= EXPIRING:
        return None
    return f"the certificate of {kit.name} ends in {left} days: renew it (docs/federation.md)"


def check_port(kit: Kit) -> None:
    """A UserError where something else uses the server's port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", kit.port))
        except OSError:
            raise UserError(
                f"port {kit.port} is in use on this machine: stop what uses it, or provision the project with "
                f"another port"
            ) from None


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(kit: Kit) -> list[str]:
    """FLARE's own entry point for the kit."""
    kind, module = ("server", "server.server_train") if kit.server else ("client", "client.client_train")
    settings = ["secure_train=true", "org=pf2lora", "config_folder=config"]
    settings += [] if kit.server else [f"uid={kit.name}"]
    entry = f"nvflare.private.fed.app.{module}"
    return [
        sys.executable,
        "-u",
        "-m",
        "pf2lora.federation.flare.child",
        entry,
        "-m",
        str(kit.folder),
        "-s",
        f"fed_{kind}.json",
        "--set",
        *settings,
    ]


def start(
    kit: Kit, log: IO[bytes] | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a participant; it runs until it is stopped."""
    if kit.server:
        check_port(kit)
    else:
        from pf2lora.federation.protocol.policy import POLICY_FILE, read_policy
        from pf2lora.federation.protocol.site_setup import SITE_FILE, read_site_file

        read_site_file(kit.folder / "local" / SITE_FILE)
        read_policy(kit.folder / "local" / POLICY_FILE)
    (kit.folder / "transfer").mkdir(exist_ok=True)
    parent = {PARENT: str(os.getpid())}
    with locked(kit) as lock:
        process = subprocess.Popen(
            command(kit),
            cwd=kit.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            env=os.environ | ENGINE | dict(environment or {}) | parent,
            start_new_session=True,
            pass_fds=(lock.fileno(),),  # the lock lives as long as the participant
        )
        lock.truncate(0)
        lock.write(str(process.pid))  # for `leave`
        return process


@contextmanager
def locked(kit: Kit) -> Iterator[IO[str]]:
    """A kit is one participant: started twice, the two would push each other out of the federation for ever."""
    with (kit.folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Running(f"{kit.name} is running already from {kit.folder}; stop it first") from None
        yield lock


def leave(kit: Kit) -> None:
    """End the participant that runs from a kit, whoever started it."""
    import psutil

    try:
        with locked(kit):
            raise UserError(f"{kit.name} is not running from {kit.folder}")
    except Running:
        text = (kit.folder / "lock").read_text()
    try:
        process = psutil.Process(int(text))
        ours = str(kit.folder) in process.cmdline()
    except (ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
        ours = False
    if not ours:
        raise UserError(f"{kit.name} runs from {kit.folder}, but not on this machine or not as this user")
    end([process.pid])


def stop(*processes: subprocess.Popen[bytes]) -> None:
    """End the processes and everything they started."""
    end([process.pid for process in processes])
    for process in processes:
        process.wait()


def end(pids: Sequence[int]) -> None:
    """End processes and everything they started (job processes run in sessions of their own)."""
    import psutil

    family: list[psutil.Process] = []
    for pid in pids:
        try:
            parent = psutil.Process(pid)
            family += [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for member in family:
        try:
            member.send_signal(signal.SIGTERM)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT)
    for member in alive:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


@contextmanager
def running(processes: dict[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Everything in `processes` is stopped at the end, whatever ends it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        stop(*processes.values())
        signal.signal(signal.SIGTERM, before)


def in_foreground(
    kit: Kit, meanwhile: Callable[[], None] = lambda: None, log: IO[bytes] | None = None
) -> int:
    """Run a participant until it ends or Ctrl-C; its exit code. `meanwhile` is done now and then; what FLARE says goes
    to `log`, or else where this process's own words go. A UserError where the server refuses it."""
    errors = kit.folder / ERRORS
    before = errors.stat().st_size if errors.exists() else 0
    process = start(kit, log)
    with running({kit.name: process}):
        try:
            while process.poll() is None:
                meanwhile()
                time.sleep(0.2)
        except KeyboardInterrupt:
            return 0
    if process.returncode and REFUSED in new_text(errors, before):
        raise UserError(
            f"the server refused {kit.name}: it was removed, or one is connected already, which must end first (does "
            f"somebody else have this kit? one that was cut off is let in after two minutes); ask the server's keeper"
        )
    return process.returncode


def new_text(file: Path, before: int) -> str:
    """What a log has beyond its first bytes."""
    try:
        with file.open("rb") as opened:
            opened.seek(before)
            return opened.read().decode("utf8", errors="replace")
    except OSError:
        return ""
