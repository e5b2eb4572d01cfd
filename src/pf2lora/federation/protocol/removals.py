"""Whom a participant has removed: a list in its own kit, which is not sent to anybody."""

from __future__ import annotations

from pathlib import Path

from pf2lora.errors import UserError
from pf2lora.parsing import read_json

REMOVED = "disabled_clients.json"  # FLARE's name for the server's list; ours has people in it too


def removed(kit: Path) -> list[str]:
    """Whom the server of this kit no longer lets in. In a site's kit: the people whose plans it no longer takes, and
    the sites with which it is in no masked sum."""
    if not (kit / REMOVED).exists():
        return []
    values = read_json(kit / REMOVED)
    found = values.get("disabled_clients") if isinstance(values, dict) else None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{kit / REMOVED} is damaged: it holds no list of disabled_clients")
    return found
