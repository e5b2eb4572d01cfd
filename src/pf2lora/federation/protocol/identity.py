"""Who a site is, to other sites: its kit's certificate signs, and others' certificates are checked by the authority's.

The server passes these messages on and cannot change them: it has no site's private key.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from pf2lora.errors import UserError
from pf2lora.federation.protocol.secure_sum import Refused

PSS = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)


@dataclass(frozen=True)
class KitIdentity:
    """A site's certificate with its key, and the authority's certificate."""

    certificate: str
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
    root: x509.Certificate

    @classmethod
    def of(cls, startup: Path) -> KitIdentity:
        """The identity in a kit's `startup/`."""
        try:
            key = load_pem_private_key((startup / "client.key").read_bytes(), None)
            own = x509.load_pem_x509_certificate((startup / "client.crt").read_bytes())
            root = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{startup}: the kit's certificate cannot be read ({error})") from None
        if not isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
            raise UserError(f"{startup / 'client.key'} is no RSA or elliptic-curve key")
        return cls(own.public_bytes(Encoding.PEM).decode(), key, root)

    def sign(self, data: bytes) -> str:
        """A signature, in hexadecimal."""
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(data, PSS, SHA256()).hex()
        return self.key.sign(data, ec.ECDSA(SHA256())).hex()

    def check(self, site: str, certificate: str, data: bytes, signature: str) -> None:
        """`Refused` unless the certificate is `site`'s, of this authority, in date, and signed the data."""
        try:
            found = x509.load_pem_x509_certificate(certificate.encode())
            found.verify_directly_issued_by(self.root)
            (name,) = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            key, signed = found.public_key(), bytes.fromhex(signature)
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(signed, data, PSS, SHA256())
            elif isinstance(key, ec.EllipticCurvePublicKey):
                key.verify(signed, data, ec.ECDSA(SHA256()))
            else:
                raise ValueError("a key of another kind")
        except (ValueError, TypeError, InvalidSignature):
            raise Refused(f"the keys of {site} are not signed by a certificate of the federation") from None
        if name.value != site:
            raise Refused(f"the keys of {site} are signed by another participant")
        if not found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc:
            raise Refused(f"the certificate of {site} is not, or no longer, valid")
