"""Who somebody is, to those whom the server stands between: a kit's key signs, and the authority's certificate tells
whose signature it is. A site is known so to other sites, and a lead to all of them.

The server passes on what was signed and cannot change it: it has no private key of theirs, and its own certificate is
neither a site's nor a lead's.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from pf2lora.errors import UserError
from pf2lora.federation.protocol.names import is_site_name

# Where FLARE's certificates say what somebody is: `client` (a site), `server`, or a person's role. Those of `provision`
# say it of people alone: there a site is whoever has a site's name, which the server has not.
ROLE = NameOID.UNSTRUCTURED_NAME
PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


class Refused(UserError):
    """Something in a round of masks is not as it must be; nothing was revealed."""


@dataclass(frozen=True)
class Signer:
    """Whom a certificate of the authority names, and as what; whether it is in date."""

    name: str
    roles: frozenset[str]
    in_date: bool


@dataclass(frozen=True)
class Authority:
    """The authority's certificate, by which participants' certificates are known."""

    root: x509.Certificate

    @classmethod
    def of(cls, startup: Path) -> Authority:
        """The authority in any participant's `startup/`."""
        return Authority(read_certificate(startup / "rootCA.pem"))

    def check(self, site: str, certificate: str, data: bytes, signature: str) -> None:
        """`Refused` unless the certificate is that of the site `site`, of this authority, in date, and signed the
        data."""
        try:
            found = self.signer(certificate, data, signature)
        except ValueError:
            raise Refused(f"the keys of {site} are not signed by a certificate of the federation") from None
        if found.name != site:
            raise Refused(f"the keys of {site} are signed by another participant")
        if not is_site_name(site) or found.roles - {"client"}:
            raise Refused(f"the keys of {site} are signed by a participant that is no site")
        if not found.in_date:
            raise Refused(f"the certificate of {site} is not, or no longer, valid")

    def signer(self, certificate: str, data: bytes, signature: str) -> Signer:
        """Who signed the data; a ValueError where it was nobody with a certificate of this authority."""
        try:
            found = x509.load_pem_x509_certificate(certificate.encode())
            found.verify_directly_issued_by(self.root)
            (name,) = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            roles = {role.value for role in found.subject.get_attributes_for_oid(ROLE)}
            key, signed = found.public_key(), bytes.fromhex(signature)
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(signed, data, PSS, SHA256())
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signed, data, ec.ECDSA(SHA256()))
            else:
                raise ValueError("a key of another kind")
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion):
            raise ValueError("nobody with a certificate of this authority signed this") from None
        in_date = found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc
        return Signer(str(name.value), frozenset(map(str, roles)), in_date)


@dataclass(frozen=True)
class KitIdentity(Authority):
    """A site's or a person's certificate with its key, and the authority's certificate."""

    certificate: str
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey

    @classmethod
    def of(cls, startup: Path) -> KitIdentity:
        """The identity in a site's or a person's `startup/`."""
        own, file = read_certificate(startup / "client.crt"), startup / "client.key"
        try:
            key = load_pem_private_key(file.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file}: the kit's key cannot be read ({error})") from None
        if not isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
            raise UserError(f"{file} is no RSA or elliptic-curve key")
        root = Authority.of(startup).root
        return cls(root, own.public_bytes(Encoding.PEM).decode(), key)

    def sign(self, data: bytes) -> str:
        """A signature, in hexadecimal."""
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(data, PSS, SHA256()).hex()
        return self.key.sign(data, ec.ECDSA(SHA256())).hex()


def read_certificate(file: Path) -> x509.Certificate:
    """A certificate of a kit."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the kit's certificate cannot be read ({error})") from None
