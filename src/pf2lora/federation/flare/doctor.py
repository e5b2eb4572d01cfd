"""What could keep a participant from taking part, looked at on its own machine: one check after the other.

It takes the place of FLARE's `preflight-check`, which reads the start scripts that our kits do not have, and knows
nothing of data, model and rules.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pf2lora import __version__
from pf2lora.errors import UserError
from pf2lora.federation import require_nvflare
from pf2lora.federation.flare.processes import (
    EXPIRING,
    Running,
    certificates,
    check_key,
    check_port,
    days_left,
    locked,
    read_kit,
)
from pf2lora.federation.flare.provision import INSIDE
from pf2lora.federation.flare.reach import PATIENCE, connected, proxy_for
from pf2lora.federation.kit import Kit
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.checkup import (
    Check,
    Doubt,
    SiteCheckup,
    Skipped,
    examine,
    free_space,
    owners_alone,
)
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.site_setup import SITE_FILE

RULES = ("resources.json", "authorization.json", INSIDE)  # without which FLARE would fall back on its own
OF_A_SITE = (*RULES, "privacy.json")
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex(
    "000000040000000000"
)  # HTTP/2 with no settings
NOT_YET, EXPIRED = 9, 10  # OpenSSL's codes of a certificate that the clock speaks against
UNSYNCHRONISED = 5  # adjtimex(2): the kernel's clock is not kept right by anybody


def examined(folder: Path, plan: Plan | None, *, of_run: bool = False) -> Iterator[Check]:
    """The checks of the kit in `folder`, as they are done. At a site the `plan` says for what data, model and a step
    are looked at, as `of_run` one that a lead will submit; at the server there is none."""
    kit = read_kit(folder)
    yield examine("version", version)
    yield examine("kit", partial(complete, kit))
    yield examine("certificate", partial(certificate, kit))
    yield examine("keys", partial(keys, kit))
    if kit.server:
        yield examine("clock", partial(clock, kit, []))
        yield examine("port", partial(own_port, kit))
        yield examine("disk", partial(free_space, kit.folder))
        yield examine("removed sites", partial(let_in_no_more, kit))
        yield examine("audit log", partial(audit_log, kit))
        return
    seen: list[bytes] = []
    yield examine("server", partial(server, kit, seen))
    yield examine("clock", partial(clock, kit, seen))
    yield examine("audit log", partial(audit_log, kit))
    assert plan is not None
    site = SiteCheckup(plan, kit.folder / "local" / SITE_FILE, kit.name, of_run=of_run)
    yield examine("policy.toml", site.rules)
    yield examine("site.toml", site.own_file)
    yield examine("disk", site.disk)
    yield examine("data", site.data)
    yield examine("model", site.model)
    yield examine("one step", site.step)
    yield examine("rows", site.rows)  # more is known of them after a step


def version() -> str:
    """The versions, which must be the same everywhere."""
    return f"pf2lora {__version__}, nvflare {require_nvflare()}"


def complete(kit: Kit) -> str:
    """The kit has its own rules."""
    for name in RULES if kit.server else OF_A_SITE:
        if not (kit.folder / "local" / name).is_file():
            raise UserError(f"{kit.folder / 'local' / name} is missing: ask for a new kit for {kit.name}")
    return f"{kit.folder} is the kit of {kit.name}"


def certificate(kit: Kit) -> str:
    """The certificate is this authority's and in date, and the key is its own."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    own, root = certificates(kit)
    try:
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(
            f"{kit.certificate} is not signed by the authority of {kit.root.name}: ask for a new kit for {kit.name}"
        ) from None
    try:
        key = load_pem_private_key(kit.key.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"{kit.key} is missing or damaged: ask for a new certificate for {kit.name}"
        ) from None
    if key.public_key() != own.public_key():
        raise UserError(
            f"{kit.key} is not the key of {kit.certificate.name}: use those that were made together"
        )
    left, ends = days_left(kit), own.not_valid_after_utc
    line = f"signed by the project's authority, valid until {ends:%Y-%m-%d}, {left} days left"
    if left < EXPIRING:
        raise Doubt(f"{line}: renew it (docs/federation.md)")
    return line


def keys(kit: Kit) -> str:
    """What is secret can be read by its owner alone."""
    if not kit.key.exists():
        raise UserError(f"{kit.key} is missing: ask for a new certificate for {kit.name}")
    check_key(kit)
    owners_alone(kit.folder / audit.FILE)
    return f"{kit.key.name} can be read by its owner alone"


def server(kit: Kit, seen: list[bytes]) -> str:
    """The server answers, is this authority's, and lets this certificate in. Its own is added to `seen`."""
    host, port = kit.host, kit.port
    where = f"{host}:{port}"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(kit.root)
        context.load_cert_chain(kit.certificate, kit.key)
        context.set_alpn_protocols(["h2"])
    except (OSError, ssl.SSLError):
        raise Skipped("it is asked with certificate and key, of which one is wrong") from None
    try:
        with (
            connected(host, port) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            seen.append(tls.getpeercert(binary_form=True) or b"")
            tls.sendall(GREETING)
            answered = tls.recv(1)  # a certificate that it does not take is refused here
    except socket.gaierror:
        raise UserError(
            f"no address is known for {host!r}: ask the lead for the server's name, or look at DNS"
        ) from None
    except ConnectionRefusedError:
        raise UserError(f"nothing listens at {where}: is the server started, and its port open?") from None
    except TimeoutError:
        raise UserError(
            f"{where} does not answer within {PATIENCE:g} s: a firewall may hold connections to that port back"
        ) from None
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (NOT_YET, EXPIRED):
            raise UserError(
                f"the server's certificate is not in date by this machine's clock ({datetime.now(UTC):%Y-%m-%d %H:%M} "
                f"UTC): set the clock, or the lead renews the certificate"
            ) from None
        raise UserError(
            f"{where} is no server of this federation ({error.verify_message}): does something intercept TLS?"
        ) from None
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"{where} refuses this certificate ({error.strerror or error}): ask the lead for a new one"
        ) from None
    if not answered:
        raise UserError(f"{where} hangs up at this certificate: ask the lead for a new one")
    way = " through the proxy" if proxy_for(host) else ""
    return f"{where} answers{way}, with a certificate of this authority, and takes ours"


def clock(kit: Kit, seen: list[bytes]) -> str:
    """The clock, as far as can be told: FLARE's server tells nobody its own, so it is the certificates' dates."""
    from cryptography import x509

    now = datetime.now(UTC)
    try:
        own = certificates(kit)
    except UserError:
        raise Skipped(
            f"{now:%Y-%m-%d %H:%M} UTC; it is judged by the certificates, and one is wrong"
        ) from None
    known = [*own, *(x509.load_der_x509_certificate(data) for data in seen)]
    begins = max(found.not_valid_before_utc for found in known)
    if now < begins:
        raise UserError(
            f"it is {now:%Y-%m-%d %H:%M} UTC here, and a certificate begins at {begins:%Y-%m-%d %H:%M}: set the clock"
        )
    of = "its own and the server's" if seen else "its own"
    line = f"{now:%Y-%m-%d %H:%M} UTC lies within the dates of certificates ({of})"
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)  # Linux has it
    if adjtimex is None:
        return line
    if adjtimex(ctypes.create_string_buffer(512)) == UNSYNCHRONISED:
        raise Doubt(f"{line}; nothing is known to keep the clock right: chrony or systemd-timesyncd would")
    return f"{line}, and it is synchronised"


def own_port(kit: Kit) -> str:
    """The server's port is free, or the server's already."""
    try:
        with locked(kit):
            check_port(kit)
        return f"{kit.port} is free; sites must be let through to it"
    except Running:
        pass
    try:
        with socket.create_connection(("localhost", kit.port), timeout=PATIENCE):
            return f"the server runs from this kit and listens on {kit.port}"
    except OSError:
        raise UserError(
            f"the server runs from this kit, and nothing listens on {kit.port}: see its output"
        ) from None


def let_in_no_more(kit: Kit) -> str:
    """The list of removed sites can be read: FLARE's server does not start without."""
    return ", ".join(removed(kit.folder)) or "none"


def audit_log(kit: Kit) -> str:
    """The audit log is unbroken."""
    if not (kit.folder / audit.FILE).exists():
        return "nothing is written yet"
    return f"{audit.verify(kit.folder).lines} lines, unbroken"
