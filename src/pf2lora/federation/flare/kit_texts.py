"""What a kit says to whoever opens it. FLARE's own scripts would start a participant without our lock and settings."""

from __future__ import annotations

from pathlib import Path

from pf2lora import atomic

SCRIPT = """#!/usr/bin/env bash
# Starts this participant until Ctrl-C, with its lock and its settings.
exec pf2lora federation join "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)" "$@"
"""
OF_ALL = """This is the start-up kit of {name}, a participant of a federation of pf2lora.

startup/   its certificate, its private key and where the server is. Keep client.key or server.key to yourself.
"""
OF_A_SITE = """local/     this site's own rules. No message changes them:
           site.toml    where its data, base model and state are (to be written; docs/federation.md)
           policy.toml  what a run may ask of it
           the others   what classes a job may name, what may leave, who may do what

    pf2lora federation doctor .          whether it can take part
    pf2lora federation join .            take part, until Ctrl-C
    pf2lora federation approve .         runs that wait for a person, where policy.toml says so
    pf2lora federation verify .          whether audit.jsonl, what this site let out and refused, is unbroken
"""
OF_THE_SERVER = """local/     who may do what, and what classes a job may name
runs/      the runs, once there are some

    pf2lora federation doctor .          whether it can serve
    pf2lora federation join .            serve, until Ctrl-C
    pf2lora federation verify .          whether audit.jsonl is unbroken
"""
OF_A_PERSON = """    pf2lora federation status --kit .            where every run stands
    pf2lora federation submit --kit . …          hand a run to the server (a lead's kit)
    pf2lora federation stop NAME --kit .         (a lead's kit)
"""
REPLACED = ("start.sh", "sub_start.sh", "stop_fl.sh", "fl_admin.sh", "readme.txt", "system_info.ipynb")
UNSAFE = ("authorization.json.default", "resources.json.default", "privacy.json.sample")
"""FLARE falls back on them where the files of these names without the ending are gone: a kit without its own rules
should not start at all."""


def write_texts(kit: Path) -> None:
    """Our texts in place of FLARE's, in the kit of the server, a site or a person."""
    server, site = ((kit / "startup" / file).is_file() for file in ("fed_server.json", "fed_client.json"))
    for folder in (kit, kit / "startup"):
        for name in REPLACED:
            (folder / name).unlink(missing_ok=True)
    if server or site:
        for name in UNSAFE:
            (kit / "local" / name).unlink(missing_ok=True)
        atomic.write_text(kit / "startup" / "start.sh", SCRIPT)
        (kit / "startup" / "start.sh").chmod(0o700)
    rest = OF_THE_SERVER if server else OF_A_SITE if site else OF_A_PERSON
    atomic.write_text(kit / "readme.txt", OF_ALL.format(name=kit.name) + rest)
