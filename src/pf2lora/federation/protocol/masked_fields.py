"""The fields of a masked run's own messages, with the check of each: keys, and shares of secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pf2lora.federation.protocol.names import SITE
from pf2lora.federation.protocol.shamir import HASH, SHARE

PEM = re.compile(r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]{1,8000}\n-----END CERTIFICATE-----\n")
SEALED = 2 * SHARE + 16 + 2 * HASH  # bytes of two encrypted shares with their hashes
HEX = ("sharing", "masking", "seed_hash")  # of a site's keys


def is_hex(value: Any, bytes_: int, most: int | None = None) -> bool:
    """So many bytes in hexadecimal; with `most`, up to that."""
    fits = isinstance(value, str) and bool(re.fullmatch(r"(?:[0-9a-f]{2})+", value))
    return fits and bytes_ <= len(value) // 2 <= (most or bytes_)


def is_keys(value: Any) -> bool:
    """A site's public keys."""
    if not isinstance(value, dict) or set(value) != {*HEX, "certificate", "signature"}:
        return False
    return (
        all(is_hex(value[name], 32) for name in HEX)
        and isinstance(value["certificate"], str)
        and bool(PEM.fullmatch(value["certificate"]))
        and is_hex(value["signature"], 1, 1024)
    )


def by_site(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The check of something for each of some sites."""
    return lambda value: (
        isinstance(value, dict)
        and all(bool(SITE.fullmatch(site)) and check(found) for site, found in value.items())
    )


def is_share(value: Any) -> bool:
    """One share, and of what."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and value[0] in ("seed", "key")
        and is_hex(value[1], SHARE)
    )


def is_sites(value: Any) -> bool:
    """Names of sites, none twice."""
    fits = isinstance(value, list) and all(isinstance(s, str) and SITE.fullmatch(s) for s in value)
    return fits and len(set(value)) == len(value)


is_roster, is_sealed, is_unmasking = (
    by_site(check) for check in (is_keys, lambda value: is_hex(value, SEALED), is_share)
)
REQUESTS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "keys": {},
    "shares": {"roster": is_roster},
    "unmask": {"answered": is_sites},
}
ANSWERS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "keys": {"keys": is_keys},
    "shares": {"shares": is_sealed},
    "unmask": {"unmask": is_unmasking},
}
"""The kinds of messages that only a masked run has, with their fields beside the round."""

UPDATE: Mapping[str, Callable[[Any], bool]] = {"unopened": is_sites}
"""What a masked update may say beside an update's own fields: whose shares its site could not open."""
