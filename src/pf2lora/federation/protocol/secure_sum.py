"""A sum whose parts nobody sees: the protocol of Bonawitz et al. (2017) for one round, without any network.

1. Each site draws two X25519 keys and a seed, and shows the public keys and the seed's hash, signed with its
   certificate.
2. It splits its mask key and its seed into shares, one for every site, each encrypted for that site alone, with the
   hashes of the shares beside them.
3. It adds to its numbers, in a ring, its own mask (from the seed) and one for every other site (from both keys and the
   x that it began with, with opposite signs at the two ends). Whose shares it cannot open, it says.
4. The server says who answered. Of each who did, the others give their shares of the seed; of each who did not, those
   of the mask key; never both of one. With shares of a majority of the round's sites by the plan the server takes away
   exactly the masks that are left, and has the sum. What arrives later keeps its own mask.

What a site signs and encrypts names the run, the round and everybody's keys, so nothing fits into another round. Masks
of two sites cancel where both began with the same x: a server that gives one of them another, with which it learns
nothing say, so that the sum were the other's alone, has noise. The
hashes tell who is at fault: who gives a share that has not its hash changed it, and where shares that have theirs make
no secret, it is whoever dealt them.

This is what all know of a round, and a site's half; `server_sum.py` is the server's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from pf2lora.errors import UserError
from pf2lora.federation.protocol import ring, shamir
from pf2lora.federation.protocol.identity import Refused
from pf2lora.federation.protocol.shamir import HASH, majority

ONCE = bytes(12)  # AES-GCM's nonce: every key encrypts one message


class AlreadySummed(UserError):
    """The round was summed: a second sum of it, without some site, would tell that site's part."""


class LostKeys(UserError):
    """The round's keys are not, or no longer, here."""


class Authority(Protocol):
    """Knows sites' certificates."""

    def check(self, site: str, certificate: str, data: bytes, signature: str) -> None:
        """`Refused` unless `site`'s certificate signed the data."""
        ...


class Identity(Authority, Protocol):
    """Who a site is: it signs with its certificate's key, and knows others' certificates by their authority."""

    @property
    def certificate(self) -> str: ...

    def sign(self, data: bytes) -> str: ...


@dataclass(frozen=True)
class Keys:
    """What a site shows of its keys, in hexadecimal: for shares, for masks, the hash of its seed."""

    sharing: str
    masking: str
    seed_hash: str
    certificate: str
    signature: str = ""

    def signed_part(self, context: bytes, site: str) -> bytes:
        """What the signature is of."""
        said = asdict(self) | {"signature": "", "site": site}
        return context + json.dumps(said, sort_keys=True).encode()


Roster = Mapping[str, Keys]
"""Everybody's keys, by site."""


def roster_digest(context: bytes, roster: Roster) -> bytes:
    """What makes a round's secrets those of this round and of these sites."""
    said = json.dumps({site: asdict(keys) for site, keys in roster.items()}, sort_keys=True)
    return hashlib.sha256(context + said.encode()).digest()


def check_keys(authority: Authority, context: bytes, site: str, keys: Keys) -> None:
    """`Refused` unless a site signed these keys for this round, and they are such that secrets can be shared with."""
    authority.check(site, keys.certificate, keys.signed_part(context, site), keys.signature)
    own = X25519PrivateKey.generate()
    try:
        for key in (keys.sharing, keys.masking):
            own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
    except ValueError:  # a point of low order, with which everybody has the same secret
        raise Refused(f"the keys of {site} are none with which a secret could be shared") from None


def hashed(share: bytes) -> bytes:
    """By which a share, or a seed, is known again."""
    return hashlib.sha256(share).digest()


def committed(sealed: bytes) -> dict[str, bytes]:
    """The hashes beside two encrypted shares, by what they are shares of."""
    return {"key": sealed[-2 * HASH : -HASH], "seed": sealed[-HASH:]}


def derived(own: X25519PrivateKey, other: str, purpose: str, digest: bytes) -> bytes:
    """A key of 32 bytes that two sites share, for one purpose in one round."""
    secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    return HKDF(SHA256(), 32, salt=None, info=f"pf2lora {purpose}".encode() + digest).derive(secret)


def mask_key(own: X25519PrivateKey, other: str, start: bytes, digest: bytes) -> bytes:
    """The key of the mask that two sites share who both began the round with the x of the digest `start`."""
    return derived(own, other, f"mask {start.hex()}", digest)


def places(roster: Collection[str]) -> dict[str, int]:
    """Which share is whose, from 1."""
    return {site: at for at, site in enumerate(sorted(roster), 1)}


@dataclass
class SiteSum:
    """A site's half of one round. Each step is done once and in order; whatever else is asked is `Refused`."""

    site: str
    context: bytes
    identity: Identity
    among: Collection[str]  # the round's sites by the plan; keys of nobody else are taken
    fewest: int  # sites whose sum the server may see, if that is more than a majority of these
    removed: Collection[str] = ()  # by this site itself: it is in no sum with them
    sharing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    done: int = 0  # steps
    roster: Roster = field(default_factory=dict)
    masked: Collection[str] = ()  # whose masks are on this site's numbers
    opened: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)  # their shares

    def step(self, number: int) -> None:
        """Step `number` begins, once."""
        if self.done != number - 1:
            raise Refused(f"step {number} of a masked round was asked for after step {self.done}")
        self.done = number

    def keys(self) -> Keys:
        """Step 1: what the others need of this site."""
        self.step(1)
        sharing, masking = (k.public_key().public_bytes_raw().hex() for k in (self.sharing, self.masking))
        shown = Keys(sharing, masking, hashed(self.seed).hex(), self.identity.certificate)
        return Keys(
            **asdict(shown) | {"signature": self.identity.sign(shown.signed_part(self.context, self.site))}
        )

    def shares(self, roster: Roster) -> dict[str, bytes]:
        """Step 2: two shares for each other site, encrypted for it; everybody's keys are checked first."""
        self.step(2)
        strangers = set(roster) - set(self.among)
        if strangers:
            raise Refused(
                f"the server shows keys of {min(strangers)}, which is not in this round by the plan"
            )
        gone = set(roster) & set(self.removed)
        if gone:
            raise Refused(f"the server shows keys of {min(gone)}, which this site has removed")
        self.check_many(roster)
        own = roster.get(self.site)
        public = self.masking.public_key().public_bytes_raw().hex()
        if own is None or own.masking != public:
            raise Refused("the round's keys are not those that this site sent")
        for site, keys in roster.items():
            check_keys(self.identity, self.context, site, keys)
        self.roster, self.digest = roster, roster_digest(self.context, roster)
        at = places(roster)
        keys_, seeds = (
            shamir.split(secret, len(roster), majority(len(self.among)))
            for secret in (self.masking.private_bytes_raw(), self.seed)
        )
        self.own_share = seeds[at[self.site]]  # of its mask key it has no use for one
        return {
            site: self.sealed(site, keys_[at[site]], seeds[at[site]]) for site in roster if site != self.site
        }

    def mask(self, numbers: Tensor, sealed: Mapping[str, bytes], start: bytes = b"") -> Tensor:
        """Step 3: numbers of the ring with all masks on them. `sealed` are the others' shares for this site; `start` is
        the digest of the x with which it began."""
        self.step(3)
        if not set(sealed) < set(self.roster) or self.site in sealed:
            raise Refused("shares came from who is not in the round")
        self.check_many([*sealed, self.site])
        found = {site: self.open(site, data) for site, data in sealed.items()}
        self.masked, self.opened = set(sealed), {site: both for site, both in found.items() if both}
        if len(self.opened) + 1 < majority(len(self.among)):
            raise Refused("too many shares are not of this round, or were changed on their way")
        masked = numbers + ring.mask(self.seed, numbers.numel())
        for site in sealed:
            key = mask_key(self.masking, self.roster[site].masking, start, self.digest)
            drawn = ring.mask(key, numbers.numel())
            masked += drawn if self.site < site else -drawn
        return masked

    @property
    def unopened(self) -> list[str]:
        """Whose shares this site could not open. It does without them, as long as a majority can."""
        return sorted(set(self.masked) - set(self.opened))

    def unmask(self, answered: Collection[str]) -> dict[str, tuple[str, bytes]]:
        """Step 4: of each who answered a share of its seed, of each other a share of its mask key."""
        self.step(4)
        if not set(answered) <= {*self.masked, self.site} or self.site not in answered:
            raise Refused("the server names answers of who did not mask")
        self.check_many(answered)
        found = {
            site: ("seed", seed) if site in answered else ("key", key)
            for site, (key, seed) in self.opened.items()
        }
        return found | {self.site: ("seed", self.own_share)}

    def check_many(self, sites: Collection[str]) -> None:
        """`Refused` where so few sites would be summed that the sum told too much, or could not be unmasked."""
        least = max(self.fewest, majority(len(self.among)))
        if len(sites) < least:
            raise Refused(
                f"a sum of {len(sites)} sites was asked for; this site takes part in sums of {least} or more"
            )

    def seal(self, other: str, sender: str, receiver: str) -> AESGCM:
        """The cipher of the shares that `sender` encrypts for `receiver`, one of whom is this site."""
        purpose = f"shares {sender} {receiver}"
        return AESGCM(derived(self.sharing, self.roster[other].sharing, purpose, self.digest))

    def sealed(self, site: str, key: bytes, seed: bytes) -> bytes:
        """Another site's shares of this one's secrets: encrypted, and their hashes."""
        hashes = hashed(key) + hashed(seed)
        return self.seal(site, self.site, site).encrypt(ONCE, key + seed, hashes) + hashes

    def open(self, site: str, data: bytes) -> tuple[bytes, bytes] | None:
        """The shares of another site's mask key and seed; None where they are not of this round, not what their hashes
        say, or were changed on their way."""
        try:
            both = self.seal(site, site, self.site).decrypt(ONCE, data[: -2 * HASH], data[-2 * HASH :])
        except InvalidTag:
            return None
        key, seed = both[: shamir.SHARE], both[shamir.SHARE :]
        return (key, seed) if committed(data) == {"key": hashed(key), "seed": hashed(seed)} else None
