"""A small federation with certificates, for masked runs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from small_federation import Small, make_plan, write_data, write_model, write_site_file

from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.plan import Plan

Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


def certificate(
    name: str, key: Key, issuer: str, by: Key, days: int = 10, role: str | None = None
) -> x509.Certificate:
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, issuer)]
    if role:
        names[0] = x509.Name([*names[0], x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
    start = now - timedelta(days=20)
    return builder.not_valid_before(start).not_valid_after(now + timedelta(days=days)).sign(by, SHA256())


def write_kit(
    folder: Path, name: str, authority: Key, days: int = 10, key: Key | None = None, role: str | None = None
) -> KitIdentity:
    """What of a kit's `startup/` says who a site is."""
    own = key or ec.generate_private_key(ec.SECP256R1())
    folder.mkdir(parents=True)
    (folder / "client.key").write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    made = certificate(name, own, "authority", authority, days, role)
    root = certificate("authority", authority, "authority", authority)
    (folder / "client.crt").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "rootCA.pem").write_bytes(root.public_bytes(Encoding.PEM))
    return KitIdentity.of(folder)


def authority_of(root: Path) -> Key:
    """The root key of the kits under `root`."""
    file = root / "authority.key"
    if not file.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        file.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    found = load_pem_private_key(file.read_bytes(), None)
    assert isinstance(found, ec.EllipticCurvePrivateKey)
    return found


def more_kit(root: Path, name: str) -> KitIdentity:
    """Another participant of the federation under `root`."""
    return write_kit(root / "kits" / name / "startup", name, authority_of(root))


def masked_plan(method: str = "pf2lora", **changes: Any) -> Plan:
    return make_plan(method, masked=True, **changes)


def make_masked(root: Path, plan: Plan, policy: str = "", **changes: Any) -> Small:
    """A federation whose sites have kits with certificates of one authority."""
    if not (root / "model").exists():
        write_model(root / "model")
        write_data(root)
    authority, files = authority_of(root), {}
    for site in plan.sites:
        kit = root / "kits" / site
        write_kit(kit / "startup", site, authority)
        files[site] = write_site_file(kit / "local" / "site.toml", root, site)
        limits = "min_batch_size = 1\nmin_steps = 1\nmin_rows = 1\npublic_batch_order = true\n"
        files[site].with_name("policy.toml").write_text(limits + policy)
    return Small(plan, root, files, **changes)


def plain(plan: Plan) -> Plan:
    return Plan.from_json(json.dumps(json.loads(plan.to_json()) | {"masked": False}))
