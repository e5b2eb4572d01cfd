"""Which packages pf2lora brings along, and under which licences: `make licences` writes docs/licences.md.

From the installed packages' own metadata: the closure of pyproject.toml's dependencies, extra by extra. Versions are
those of constraints.txt; what an extra needs and is not installed here is listed as such.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# Licences of what comes along

Made by `make licences` from the metadata of the installed packages; do not edit. pf2lora itself is Apache-2.0. Each
package is listed once, where it is first needed: by pf2lora itself, or by an extra (`pip install 'pf2lora[extra]'`).
Versions are those that CI uses (`constraints.txt`); a package without one is not pinned there. On Linux, PyPI's torch
also brings NVIDIA's CUDA libraries, under NVIDIA's licence; the CPU build that CI uses does not.
"""
LONGEST = 60  # some packages give their whole licence as its name


class Package(NamedTuple):
    """A package as the page lists it."""

    name: str
    version: str
    licence: str


def groups() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for: pf2lora's own needs, then each extra's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in asked.items()}


def pinned() -> dict[str, str]:
    """The versions that CI uses, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def closure(asked: Iterable[Requirement]) -> dict[str, str]:
    """Everything that these requirements need, directly or not: names by canonical name."""
    found: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in asked]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        known = name in found
        found.setdefault(name, requirement.name)
        if known and not requirement.extras:
            continue
        try:
            needs = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [(Requirement(line), e) for line in needs for e in ("", *requirement.extras)]
    return found


def described(name: str, versions: dict[str, str]) -> Package:
    """A package with its licence, as its metadata says it."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return Package(name, "", "not installed here")
    return Package(about["Name"], versions.get(canonicalize_name(name), ""), licence_of(about))


def licence_of(about: metadata.PackageMetadata) -> str:
    """The SPDX expression; else the classifiers; else the first line of the field that came before."""
    if about["License-Expression"]:
        return str(about["License-Expression"])
    classified = [
        line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License")
    ]
    if classified and classified != ["OSI Approved"]:
        return ", ".join(classified)
    lines = [line.strip() for line in str(about["License"] or "").splitlines() if line.strip()]
    return lines[0][:LONGEST] if lines and lines[0] != "UNKNOWN" else "not stated in its metadata"


def page() -> str:
    """The page in Markdown."""
    versions, listed, parts = pinned(), set[str](), [HEAD]
    for extra, asked in groups().items():
        new = {key: name for key, name in closure(asked).items() if key not in listed and key != "pf2lora"}
        listed |= new.keys()
        title = f"pf2lora[{extra}]" if extra else "pf2lora"
        rows = [described(name, versions) for _, name in sorted(new.items())]
        lines = [f"| {p.name} | {p.version} | {p.licence.replace('|', '/')} |" for p in rows]
        parts.append(
            "\n".join(
                [f"## `{title}`", "", "| package | version | licence |", "| --- | --- | --- |", *lines, ""]
            )
        )
    return "\n".join(parts)


def listed_in(text: str) -> dict[str, str]:
    """The packages of a page with their versions, by canonical name."""
    rows = re.findall(r"^\| ([\w.-]+) \| ([^|]*) \|", text, flags=re.MULTILINE)
    return {
        canonicalize_name(name): version.strip() for name, version in rows if name not in ("package", "---")
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {len(listed_in(page()))} packages\n")
