"""Who may use which model: tokens, kept as digests alone, each with the models that it opens."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pf2lora.errors import UserError, shown, unknown
from pf2lora.parsing import read_text, read_toml

SHORTEST = 16  # characters of a token: a shorter one can be guessed
ADVICE = "'openssl rand -hex 32' makes one"
EVERYTHING = "*"


@dataclass(frozen=True)
class Holder:
    """Somebody with a token, and the models that it opens; None: all of them."""

    name: str
    digest: bytes = b""
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class Access:
    """The holders of tokens; without any, everybody who reaches the server, which is then this machine alone."""

    def __init__(self, holders: Collection[Holder] = ()) -> None:
        self.holders = tuple(holders)

    def holder(self, authorization: str | None) -> Holder | None:
        """Whose token an Authorization header brings; None: nobody's. Every token is compared, and in constant time."""
        if not self.holders:
            return Holder("anybody")
        scheme, _, token = (authorization or "").partition(" ")
        digest = digest_of(token.strip()) if scheme.lower() == "bearer" else b""
        found = [holder for holder in self.holders if hmac.compare_digest(holder.digest, digest)]
        return found[0] if found else None


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf8", "surrogateescape")).digest()


def one_token(token: str, where: str) -> Access:
    """A token that opens every model."""
    return Access([Holder("token", digest_of(checked(token.strip(), where)))])


def read_token_file(path: Path) -> Access:
    """A file that holds one token and nothing else."""
    return one_token(read_text(path, 4096, "token file"), str(path))


def read_tokens(path: Path, served: Collection[str] | None = None, for_all: Collection[str] = ()) -> Access:
    """A TOML file with a table for each holder: its `token`, and the `models` that it opens; without these, the model
    of the holder's own name and those that are `for_all`. Names are checked where it is known what is `served`."""
    tables = read_toml(path, "token file")
    holders: dict[bytes, Holder] = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping) or not isinstance(table.get("token"), str):
            raise UserError(f'{path}: [{name}] must be a table with a token = "…" ({ADVICE})')
        if more := table.keys() - {"token", "models"}:
            raise UserError(f"{path}: [{name}] has {min(more)!r}; it takes token and models")
        token = digest_of(checked(table["token"], f"{path}: [{name}]"))
        if token in holders:
            raise UserError(
                f"{path}: [{name}] has the same token as [{holders[token].name}]; each needs its own"
            )
        holders[token] = Holder(name, token, opened(path, name, table.get("models"), served, for_all))
    if not holders:
        raise UserError(
            f'{path}: no tokens; a table for each holder is needed, such as [north] with token = "…"'
        )
    return Access(holders.values())


def opened(
    path: Path, name: str, asked: object, served: Collection[str] | None, for_all: Collection[str]
) -> frozenset[str] | None:
    """The models that a holder's table names."""
    models = [name, *for_all] if asked is None else asked
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise UserError(f"{path}: [{name}] has models = {shown(models)}; it must be a list of names")
    if EVERYTHING in models:
        return None
    for model in models:
        if served is not None and model not in served:
            hint = f"{path}: [{name}]: " + str(unknown("model", model, served))
            raise UserError(hint + ('; models = ["*"] opens all' if asked is None else ""))
    return frozenset(models)


def checked(token: str, where: str) -> str:
    """A token that nobody guesses, and that fits into a header."""
    if len(token) < SHORTEST:
        raise UserError(f"{where}: a token needs {SHORTEST} characters or more ({ADVICE})")
    if not token.isascii() or any(c.isspace() or not c.isprintable() for c in token):
        raise UserError(f"{where}: a token is one word of ASCII characters ({ADVICE})")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
