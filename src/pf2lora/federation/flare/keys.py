"""Keys that are made where they live: an authority signs requests and never sees a participant's private key.

FLARE's distributed provisioning does the work (`nvflare cert` and `nvflare package`); this decides who is signed, and
makes the kit that comes out as hardened as those of `provision`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError, unknown
from pf2lora.federation import require_nvflare
from pf2lora.federation.flare.kit_texts import write_texts
from pf2lora.federation.flare.processes import locked, open_kit
from pf2lora.federation.flare.provision import SITE_LIST, Project, harden_server, harden_site, read_project
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.names import check_name, check_sites, is_person
from pf2lora.federation.protocol.removals import REMOVED, removed
from pf2lora.federation.protocol.run_status import SITES
from pf2lora.parsing import BadJSON, parse_json, read_json

PROJECT, PROFILE = "project.toml", "profile.yml"
REMOVED_CODE = "AUTH_REMOVED"  # what a removed person's command line is told
KINDS = {
    "site": ("client", None),
    "server": ("server", None),
    "lead": ("admin", "lead"),
    "member": ("admin", "member"),
}
"""What a participant is, with FLARE's type and role."""
LARGEST = 1 << 16  # bytes of a request's description


def nvflare(*arguments: str | Path) -> dict[str, str]:
    """Run a command of FLARE's; what it printed, by name. FLARE keeps copies in the home folder, which is not ours to
    write to: it gets another."""
    require_nvflare()
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "nvflare.cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"HOME": home},
            check=False,
        )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode != 0:
        raise UserError(f"FLARE refused: {lines[0] if lines else f'exit code {done.returncode}'}")
    pairs = (line.split(": ", 1) for line in lines if ": " in line)
    return {name: value.strip() for name, value in pairs}


# --- the authority -----------------------------------------------------------------------------------------


def make_authority(project: Path, out: Path, days: int) -> str:
    """The root key of a federation, in a folder of its own; its certificate's fingerprint."""
    described = read_project(project)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{str(out)!r} is not empty; an authority goes into a new folder")
    atomic.make_folder(out, 0o700)
    atomic.write_text(out / PROFILE, profile(described))
    shutil.copyfile(project, out / PROJECT)
    # Without --org: FLARE 2.9 would name the issuer of what it signs without it, and nobody's chain would hold.
    said = nvflare("cert", "init", "--profile", out / PROFILE, "-o", out, "--valid-days", str(days))
    for file in out.iterdir():
        file.chmod(0o600)
    audit.record(out, "authority", project=described.name, fingerprint=said["rootca_fingerprint_sha256"])
    return said["rootca_fingerprint_sha256"]


def profile(project: Project) -> str:
    """A project as FLARE's distributed provisioning reads it: JSON, which is YAML."""
    server = {"host": project.host, "fed_learn_port": project.port, "admin_port": project.port}
    return json.dumps(
        {"name": project.name, "scheme": "grpc", "connection_security": "mtls", "server": server}, indent=1
    )


def sign(request: Path, authority: Path, out: Path, days: int) -> str:
    """Sign a request of somebody whom the authority's project names, as what it names them; their name."""
    project, said = read_project(authority / PROJECT), read_request(request)
    name, kind = str(said.get("name")), said.get("cert_type")
    listed = {project.host: "server", project.lead: "lead"}
    listed |= dict.fromkeys(project.members, "member") | dict.fromkeys(project.sites, "client")
    if said.get("project") != project.name or listed.get(name) != kind:
        raise UserError(
            f"{request} asks for a certificate of {name!r} as {kind} of {said.get('project')!r}, which "
            f"{authority / PROJECT} does not name so: add it there first"
        )
    ca = ("-c", authority, "--profile", authority / PROFILE, "--valid-days", str(days))
    nvflare("cert", "approve", request, *ca, "--out", out)
    if kind == "server":  # it gets to know its sites' names, to tell a mistyped one
        with zipfile.ZipFile(out, "a") as archive:
            archive.writestr(SITE_LIST, json.dumps(project.sites))
    digest = str(said.get("public_key_sha256"))
    audit.record(authority, "signed", name=name, kind=kind, public_key=digest, days=days)
    return name


def read_request(file: Path) -> dict[str, Any]:
    """What a request says of itself. FLARE checks its parts against each other; this only reads who it is."""
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.getinfo("request.json").file_size > LARGEST:
                raise UserError(f"{file}: its description is too long to be one")
            found = parse_json(archive.read("request.json"))
    except (OSError, zipfile.BadZipFile, KeyError, BadJSON, NotImplementedError):
        raise UserError(f"{file} is no request: `pf2lora federation request` makes them") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is no request: `pf2lora federation request` makes them")
    return found


# --- a participant -----------------------------------------------------------------------------------------


def make_request(name: str, kind: str, project: str, out: Path) -> Path:
    """A private key, in a folder that stays here, and the request for its certificate, which is sent."""
    if kind not in KINDS:
        raise UserError(f"{kind!r} is no kind of participant; it is {', '.join(KINDS)}")
    check_name("project", project)
    if kind == "site":
        check_sites([name])
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{str(out)!r} is not empty; a request goes into a new folder")
    atomic.make_folder(out, 0o700)
    flare_type, role = KINDS[kind]
    person = {"name": name, "type": flare_type, "org": "pf2lora"} | ({"role": role} if role else {})
    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "participant.yml"
        atomic.write_text(described, json.dumps({"name": project, "participants": [person]}))
        said = nvflare("cert", "request", "-p", described, "--out", out)
    return Path(said["request_zip"])


def make_kit(signed: Path, request: Path, fingerprint: str, out: Path) -> Path:
    """The kit of a signed request, with the key that was made for it. One that is in `out` already is renewed: it gets
    the new certificate and key, and keeps its own rules, runs and audit log."""
    if not signed.is_file():
        raise UserError(f"there is no file {str(signed)!r}: it is what the authority sends back")
    with tempfile.TemporaryDirectory(dir=atomic.make_folder(out.parent)) as scratch:
        named = Path(scratch) / "kit.signed.zip"  # FLARE knows what it is by its name
        sites = without_sites(signed, named)
        own = ("--request-dir", request, "--fingerprint", fingerprint)
        made = nvflare("package", named, *own, "-w", Path(scratch) / "made")
        kit = Path(made["output_dir"])
        if (kit / "startup" / "fed_server.json").is_file():
            harden_server(kit)
            if sites:
                atomic.write_json(kit / "local" / SITE_LIST, sites)
        elif (kit / "startup" / "fed_client.json").is_file():
            harden_site(kit)
        write_texts(kit)
        for path in kit.rglob("*"):
            if path.is_dir():
                path.chmod(0o700)
            elif path.suffix == ".key":
                path.chmod(0o600)
        if (out / "startup").is_dir():
            renew(kit, out)
        elif out.exists() and any(out.iterdir()):
            raise UserError(f"{str(out)!r} is not empty and no kit; a kit goes into a new folder")
        else:
            shutil.rmtree(out, ignore_errors=True)
            shutil.move(kit, out)
            out.chmod(0o700)
    return out


def without_sites(signed: Path, out: Path) -> list[str]:
    """Copy what the authority sent back as FLARE knows it; the sites' names, which a server's has beside that."""
    try:
        with zipfile.ZipFile(signed) as archive, zipfile.ZipFile(out, "w") as rest:
            names = archive.namelist()
            if max((part.file_size for part in archive.infolist()), default=0) > LARGEST:
                raise UserError(f"{signed} holds a file that is too long to be of a signed request")
            for name in (name for name in names if name != SITE_LIST):
                rest.writestr(name, archive.read(name))
            sites = parse_json(archive.read(SITE_LIST)) if SITE_LIST in names else []
    except (OSError, zipfile.BadZipFile, BadJSON, NotImplementedError):
        raise UserError(f"{signed} is not what the authority sends back: `sign` makes it") from None
    if not isinstance(sites, list) or not all(isinstance(site, str) for site in sites):
        raise UserError(f"{signed}: its list of sites is none")
    check_sites(sites)
    return sites


def renew(kit: Path, old: Path) -> None:
    """Put a kit's new `startup/` in the place of the old one's, which must be of the same participant, not running; a
    server's list of sites is renewed with it."""
    kinds = ("fed_server.json", "fed_client.json", "fed_admin.json")
    files = [file for file in kinds if (kit / "startup" / file).is_file()]
    if read_json(kit / "startup" / files[0]) != read_json(old / "startup" / files[0]):
        raise UserError(f"{str(old)!r} is the kit of another participant or server; choose another --out")
    if files[0] != "fed_admin.json":
        with locked(replace(open_kit(kit), folder=old.resolve())):
            pass  # nobody runs from it
    if (kit / "local" / SITE_LIST).is_file():
        shutil.copyfile(kit / "local" / SITE_LIST, old / "local" / SITE_LIST)
    before = old / "startup.old"
    shutil.rmtree(before, ignore_errors=True)
    (old / "startup").rename(before)
    shutil.move(kit / "startup", old / "startup")
    shutil.rmtree(before)


# --- who may no longer take part ---------------------------------------------------------------------------


def check_known(kit: Path, sites: Iterable[str]) -> None:
    """A UserError that names a site that the server of this kit has never heard of: neither its list of those that
    were signed has it, nor was it ever here."""
    listed = kit / "local" / SITE_LIST
    if not listed.is_file():
        return
    known = [*read_json(listed), *(file.name for file in (kit / SITES).glob("*"))]
    for site in sites:
        if site not in known:
            raise UserError(
                f"{unknown('site', site, known)} (one that was signed later is known once it has joined)"
            )


def remove(kit: Path, name: str, *, back: bool = False) -> None:
    """The server of this kit lets a site or a person in no more, whatever the certificate says; a site's kit takes no
    more plans of a person, and is in no masked sum with a site; or (`back`) again."""
    if not is_person(name):
        check_sites([name])
    if not any((kit / "startup" / f"fed_{kind}.json").is_file() for kind in ("server", "client")):
        raise UserError(f"{str(kit)!r} is no kit of the server or a site: these refuse sites and people")
    now = set(removed(kit))
    if back and name not in now:
        raise UserError(f"{name} was not removed")
    now = now - {name} if back else now | {name}
    atomic.write_json(kit / REMOVED, {"disabled_clients": sorted(now)})
    audit.record(
        kit, "lets in again" if back else "removed", **{"person" if is_person(name) else "site": name}
    )
