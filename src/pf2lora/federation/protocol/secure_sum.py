"""A sum whose parts nobody sees: the protocol of Bonawitz et al. (2017) for one round, without any network.

1. Each site draws two X25519 keys and a seed, and shows the public keys and the seed's hash, signed with its
   certificate.
2. It splits its mask key and its seed into shares, one for every site, each encrypted for that site alone.
3. It adds to its numbers, in a ring, its own mask (from the seed) and one for every other site (from both keys, with
   opposite signs at the two ends).
4. The server says who answered. Of each who did, the others give their shares of the seed; of each who did not, those
   of the mask key; never both of one. With a majority of the shares the server takes away exactly the masks that are
   left, and has the sum. What arrives later keeps its own mask.

What a site signs and encrypts names the run, the round and everybody's keys, so nothing fits into another round.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from pf2lora.errors import UserError
from pf2lora.federation.protocol import ring, shamir

ONCE = bytes(12)  # AES-GCM's nonce: every key encrypts one message


class Refused(UserError):
    """Something in a round of masks is not as it must be; nothing was revealed."""


class AlreadySummed(UserError):
    """The round was summed: a second sum of it, without some site, would tell that site's part."""


class LostKeys(UserError):
    """The round's keys are not, or no longer, here."""


class Identity(Protocol):
    """Who a site is: it signs with its certificate's key, and knows others' certificates by their authority."""

    @property
    def certificate(self) -> str: ...

    def sign(self, data: bytes) -> str: ...

    def check(self, site: str, certificate: str, data: bytes, signature: str) -> None:
        """`Refused` unless `site`'s certificate signed the data."""
        ...


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


def threshold(sites: int) -> int:
    """How many shares give a secret: more than half, so that the shares that answer one question of the server cannot,
    for any site, answer both."""
    return sites // 2 + 1


def derived(own: X25519PrivateKey, other: str, purpose: str, digest: bytes) -> bytes:
    """A key of 32 bytes that two sites share, for one purpose in one round."""
    secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    return HKDF(SHA256(), 32, salt=None, info=f"pf2lora {purpose}".encode() + digest).derive(secret)


def places(roster: Collection[str]) -> dict[str, int]:
    """Which share is whose, from 1."""
    return {site: at for at, site in enumerate(sorted(roster), 1)}


# --- a site ------------------------------------------------------------------------------------------------


@dataclass
class SiteSum:
    """A site's half of one round. Each step is done once and in order; whatever else is asked is `Refused`."""

    site: str
    context: bytes
    identity: Identity
    fewest: int  # sites whose sum the server may see
    sharing: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    masking: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    done: int = 0  # steps
    roster: Roster = field(default_factory=dict)
    sealed: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # shares from those who mask

    def step(self, number: int) -> None:
        """Step `number` begins, once."""
        if self.done != number - 1:
            raise Refused(f"step {number} of a masked round was asked for after step {self.done}")
        self.done = number

    def keys(self) -> Keys:
        """Step 1: what the others need of this site."""
        self.step(1)
        sharing, masking = (k.public_key().public_bytes_raw().hex() for k in (self.sharing, self.masking))
        shown = Keys(sharing, masking, hashlib.sha256(self.seed).hexdigest(), self.identity.certificate)
        return Keys(
            **asdict(shown) | {"signature": self.identity.sign(shown.signed_part(self.context, self.site))}
        )

    def shares(self, roster: Roster) -> dict[str, bytes]:
        """Step 2: two shares for each other site, encrypted for it; everybody's keys are checked first."""
        self.step(2)
        self.check_many(roster)
        own = roster.get(self.site)
        public = self.masking.public_key().public_bytes_raw().hex()
        if own is None or own.masking != public:
            raise Refused("the round's keys are not those that this site sent")
        for site, keys in roster.items():
            self.identity.check(site, keys.certificate, keys.signed_part(self.context, site), keys.signature)
        self.roster, self.digest = roster, roster_digest(self.context, roster)
        at, count = places(roster), len(roster)
        parts = [
            shamir.split(secret, count, threshold(count))
            for secret in (self.masking.private_bytes_raw(), self.seed)
        ]
        self.own_share = parts[1][at[self.site]]  # of its seed; of its mask key it has no use for one
        return {
            site: AESGCM(self.seal(site, self.site, site)).encrypt(
                ONCE, parts[0][at[site]] + parts[1][at[site]], None
            )
            for site in roster
            if site != self.site
        }

    def mask(self, numbers: Tensor, sealed: Mapping[str, bytes]) -> Tensor:
        """Step 3: numbers of the ring with all masks on them. `sealed` are the others' shares for this site."""
        self.step(3)
        if not set(sealed) < set(self.roster) or self.site in sealed:
            raise Refused("shares came from who is not in the round")
        self.check_many([*sealed, self.site])
        self.opened = {site: self.open(site, data) for site, data in sealed.items()}
        masked = numbers + ring.mask(self.seed, numbers.numel())
        for site in sealed:
            key = derived(self.masking, self.roster[site].masking, "mask", self.digest)
            drawn = ring.mask(key, numbers.numel())
            masked += drawn if self.site < site else -drawn
        return masked

    def unmask(self, answered: Collection[str]) -> dict[str, tuple[str, bytes]]:
        """Step 4: of each who answered a share of its seed, of each other a share of its mask key."""
        self.step(4)
        masking = {*self.opened, self.site}
        if not set(answered) <= masking or self.site not in answered:
            raise Refused("the server names answers of who did not mask")
        self.check_many(answered)
        found = {
            site: ("seed", seed) if site in answered else ("key", key)
            for site, (key, seed) in self.opened.items()
        }
        return found | {self.site: ("seed", self.own_share)}

    def check_many(self, sites: Collection[str]) -> None:
        """`Refused` where so few sites would be summed that the sum told too much, or could not be unmasked."""
        least = max(self.fewest, threshold(len(self.roster or sites)))
        if len(sites) < least:
            raise Refused(
                f"a sum of {len(sites)} sites was asked for; this site takes part in sums of {least} or more"
            )

    def seal(self, other: str, sender: str, receiver: str) -> bytes:
        """The key of the shares that `sender` encrypts for `receiver`, one of whom is this site."""
        return derived(self.sharing, self.roster[other].sharing, f"shares {sender} {receiver}", self.digest)

    def open(self, site: str, data: bytes) -> tuple[bytes, bytes]:
        """The shares of another site's mask key and seed."""
        try:
            opened = AESGCM(self.seal(site, site, self.site)).decrypt(ONCE, data, None)
        except InvalidTag:
            raise Refused(f"{site}'s shares are not of this round, or were changed on their way") from None
        return opened[: shamir.SHARE], opened[shamir.SHARE :]


# --- the server --------------------------------------------------------------------------------------------


@dataclass
class ServerSum:
    """The server's half: it passes keys and shares on, adds what arrives, and takes away the masks that are left."""

    context: bytes
    count: int  # numbers in a vector
    roster: dict[str, Keys] = field(default_factory=dict)
    sealed: dict[str, Mapping[str, bytes]] = field(default_factory=dict)  # by sender
    answered: list[str] = field(default_factory=list)
    unmasked: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=dict)  # by who told

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.count, dtype=torch.int64)

    def shares_for(self, site: str) -> dict[str, bytes]:
        """What the others who share encrypted for a site."""
        return {sender: found[site] for sender, found in self.sealed.items() if sender != site}

    def take_shares(self, site: str, found: Mapping[str, bytes]) -> None:
        """A site's encrypted shares; they must be for everybody else."""
        if set(found) != set(self.roster) - {site}:
            raise Refused("its shares are not for all others of the round")
        self.sealed[site] = found

    def add(self, site: str, masked: Tensor) -> None:
        """A site's masked numbers."""
        self.total += masked
        self.answered.append(site)

    def take_unmasking(self, site: str, found: Mapping[str, tuple[str, bytes]]) -> None:
        """A site's shares of what is to be taken away: exactly the kind that was asked for, of everybody who masks."""
        wanted = {other: "seed" if other in self.answered else "key" for other in self.sealed}
        if {other: kind for other, (kind, _) in found.items()} != wanted:
            raise Refused("it did not give the shares that were asked for")
        self.unmasked[site] = dict(found)

    def unmask(self) -> tuple[Tensor, dict[str, str]]:
        """The sum over those who answered, and whose shares were wrong. `Refused` where too few gave right ones."""
        at, digest = places(self.roster), roster_digest(self.context, self.roster)
        total, wrong = self.total, dict[str, str]()
        for site in self.sealed:
            shares = {at[who]: found[site][1] for who, found in self.unmasked.items()}
            secret, bad = self.secret_of(site, shares)
            wrong |= {who: f"its share of {site}'s secret is wrong" for who in self.roster if at[who] in bad}
            if site in self.answered:
                total = total - ring.mask(secret, self.count)
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            for other in self.answered:  # whose masks with this site nothing cancels
                drawn = ring.mask(derived(key, self.roster[other].masking, "mask", digest), self.count)
                total = total - (drawn if other < site else -drawn)
        return total, wrong

    def secret_of(self, site: str, shares: Mapping[int, bytes]) -> tuple[bytes, set[int]]:
        """A site's seed or mask key, which what it showed in step 1 confirms."""
        keys = self.roster[site]

        def fits(secret: bytes) -> bool:
            if site in self.answered:
                return hashlib.sha256(secret).hexdigest() == keys.seed_hash
            public = X25519PrivateKey.from_private_bytes(secret).public_key()
            return public.public_bytes_raw().hex() == keys.masking

        try:
            return shamir.join(shares, threshold(len(self.roster)), fits)
        except shamir.NoSecret as error:
            raise Refused(f"the masks of {site} cannot be taken away: {error}") from None
