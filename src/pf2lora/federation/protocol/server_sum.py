"""The server's half of a sum whose parts nobody sees (`secure_sum.py`): who is in it, what is taken away, and where
there is no sum to be had, whose doing that is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from pf2lora.federation.protocol import ring, shamir
from pf2lora.federation.protocol.secure_sum import (
    Keys,
    Refused,
    committed,
    hashed,
    mask_key,
    places,
    roster_digest,
)
from pf2lora.federation.protocol.shamir import majority


class BadDealer(Refused):
    """The shares that a `site` dealt make no secret."""

    def __init__(self, site: str) -> None:
        super().__init__(f"the shares that {site} dealt do not give its secret")
        self.site = site


@dataclass
class ServerSum:
    """The server's half: it passes keys and shares on, adds what arrives, and takes away the masks that are left."""

    context: bytes
    count: int  # numbers in a vector
    among: Collection[str]  # the round's sites by the plan
    roster: dict[str, Keys] = field(default_factory=dict)
    sealed: dict[str, Mapping[str, bytes]] = field(default_factory=dict)  # by sender
    answered: list[str] = field(default_factory=list)
    unopened: dict[str, Collection[str]] = field(default_factory=dict)  # by who could not open them
    unmasked: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=dict)  # by who told
    start: bytes = b""  # the digest of the x that sites were served

    def __post_init__(self) -> None:
        self.total = torch.zeros(self.count, dtype=torch.int64)
        self.least = majority(len(self.among))

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

    def holders(self, site: str) -> list[str]:
        """Of those who answered, who can give a share of a site's secret."""
        return [who for who in self.answered if site not in self.unopened.get(who, ())]

    def at_fault(self) -> tuple[dict[str, str], dict[str, str]]:
        """Who must be left out of another try, since a secret could not be put together, with the reason: whoever dealt
        shares that more sites cannot open than can; else those who say so, who may be right, but are the fewer. One
        site's word alone costs nobody a round in which there are more than a majority."""
        dealers, doubters = dict[str, str](), dict[str, str]()
        for site in self.sealed if len(self.answered) >= self.least else ():
            others = [who for who in self.answered if who != site]
            cannot = [who for who in others if site in self.unopened.get(who, ())]
            if len(self.holders(site)) >= self.least:
                continue
            if 2 * len(cannot) > len(others):
                dealers[site] = f"{len(cannot)} of {len(others)} sites cannot open the shares that it dealt"
            else:
                doubters |= dict.fromkeys(cannot, f"it cannot open the shares of {site}, which others can")
        return dealers, {site: why for site, why in doubters.items() if site not in dealers}

    def take_unmasking(self, site: str, found: Mapping[str, tuple[str, bytes]]) -> None:
        """A site's shares of what is to be taken away: those that it was dealt, exactly of the kind that was asked for,
        of everybody who masks and whose shares it could open."""
        wanted = {
            other: "seed" if other in self.answered else "key"
            for other in self.sealed
            if other == site or other not in self.unopened.get(site, ())
        }
        if {other: kind for other, (kind, _) in found.items()} != wanted:
            raise Refused("it did not give the shares that were asked for")
        for other, (kind, share) in found.items():
            if other != site and hashed(share) != committed(self.sealed[other][site])[kind]:
                raise Refused(f"its share of {other}'s secret is wrong")
        self.unmasked[site] = dict(found)

    def unmask(self) -> Tensor:
        """The sum over those who answered. `Refused` where too few gave shares; `BadDealer` where it is one site's
        doing."""
        at, digest, total = places(self.roster), roster_digest(self.context, self.roster), self.total
        for site in self.sealed:
            told = {who: found[site][1] for who, found in self.unmasked.items() if site in found}
            if len(told) > self.least:
                told.pop(site, None)  # its own share has no hash by which it could be known
            secret = self.secret_of(site, {at[who]: share for who, share in told.items()})
            if site in self.answered:
                total = total - ring.mask(secret, self.count)
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            for other in self.answered:  # whose masks with this site nothing cancels
                mask = mask_key(key, self.roster[other].masking, self.start, digest)
                drawn = ring.mask(mask, self.count)
                total = total - (drawn if other < site else -drawn)
        return total

    def secret_of(self, site: str, shares: Mapping[int, bytes]) -> bytes:
        """A site's seed or mask key, which what it showed in step 1 confirms."""
        keys = self.roster[site]
        if len(shares) < self.least:
            raise Refused(
                f"the masks of {site} cannot be taken away: {len(shares)} shares, of which {self.least} are needed"
            )
        try:
            secret = shamir.join(shares, self.least)
        except shamir.NoSecret:
            raise BadDealer(site) from None
        if site in self.answered:
            fits = hashed(secret).hex() == keys.seed_hash
        else:
            public = X25519PrivateKey.from_private_bytes(secret).public_key()
            fits = public.public_bytes_raw().hex() == keys.masking
        if not fits:
            raise BadDealer(site)
        return secret
