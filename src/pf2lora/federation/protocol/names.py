"""Names of sites and runs, and the names that a rehearsal gives its clients as sites."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from pf2lora.errors import UserError

SITE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9])?")
RUN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
OURS = ("server", "server_job")  # what the engine calls the server's own processes
RESERVED = (*OURS, "authority")  # the last is the folder beside the kits that holds the root key
LONGEST = 56  # characters of a derived name; a number may follow


def is_site_name(name: str) -> bool:
    """Whether a site may be called so: it is a folder's name, a certificate's subject and FLARE's name of a client."""
    return bool(SITE.fullmatch(name)) and name.lower() not in RESERVED


def is_person(name: str) -> bool:
    """People are called by their e-mail addresses, which no site's name can be."""
    return "@" in name


def check_sites(sites: Sequence[str]) -> None:
    """A UserError where a site cannot be called so, or two have one name."""
    for site in sites:
        if site.lower() in RESERVED:
            raise UserError(f"site name {site!r}: it is taken by the federation itself; choose another")
        if not is_site_name(site):
            raise UserError(
                f"site name {site!r}: use letters, digits, '_' and '-' (at most 64, letters or digits at the ends)"
            )
    twice = [name for name, count in Counter(site.lower() for site in sites).items() if count > 1]
    if twice:
        raise UserError(
            f"two sites are called {twice[0]!r}, but for case; every site needs a name of its own"
        )


def check_name(what: str, name: str) -> None:
    """A UserError where a run or a project (`what`) cannot be called so: its name is a folder's."""
    if not RUN.fullmatch(name):
        raise UserError(
            f"{what} name {name!r}: use letters, digits, '.', '_' and '-' (at most 64, letters or digits at the ends)"
        )


def site_names(clients: Sequence[str]) -> tuple[str, ...]:
    """A site's name for each client of a rehearsal: its own where a site may be called so, else one made of it
    ("Clinic A" is clinic-a), with a number where that is taken. The same clients always get the same names."""
    taken = {name.lower() for name in clients if is_site_name(name)} | set(RESERVED)
    found = []
    for client in clients:
        name = client
        if not is_site_name(client):
            plain, number = plain_name(client), 1
            name = plain
            while name in taken:
                number += 1
                name = f"{plain}-{number}"
            taken.add(name)
        found.append(name)
    return tuple(found)


def plain_name(name: str) -> str:
    """A name in small ASCII letters, digits and dashes: "Klinik Süd" is klinik-sud; one that has none is "site"."""
    letters = unicodedata.normalize("NFKD", name.casefold())
    ascii_only = "".join(c for c in letters if not unicodedata.combining(c))
    return re.sub(r"[^a-z0-9_]+", "-", ascii_only)[:LONGEST].strip("-_") or "site"
