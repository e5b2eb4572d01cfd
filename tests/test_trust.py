"""What docs/licences.md and `make audit` promise: the listed packages are the pinned ones, and an audit that could look
nothing up does not pass."""

from __future__ import annotations

from typing import Any

import pytest
from audit import verdict
from licences import PAGE, groups, listed_in, pinned
from packaging.utils import canonicalize_name


def test_the_licences_are_of_what_is_pinned() -> None:
    listed = listed_in(PAGE.read_text(encoding="utf8"))
    assert {name: version for name, version in listed.items() if version} == pinned(), "run `make licences`"


@pytest.mark.parametrize("extra", groups())
def test_what_an_extra_asks_for_is_listed_under_it_or_before(extra: str) -> None:
    text = PAGE.read_text(encoding="utf8")
    title = f"## `pf2lora[{extra}]`\n" if extra else "## `pf2lora`\n"
    before, heading, after = text.partition(title)
    assert heading, f"run `make licences`: no {title}"
    listed = listed_in(before + after.partition("\n## ")[0])
    assert {canonicalize_name(requirement.name) for requirement in groups()[extra]} <= listed.keys()


def test_every_pinned_package_names_a_licence() -> None:
    for line in PAGE.read_text(encoding="utf8").splitlines():
        if line.startswith("| ") and not line.startswith(("| package", "| ---")):
            name, version, licence = (cell.strip() for cell in line.strip("|").split("|"))
            assert licence, name
            assert not version or licence != "not installed here", name


GOOD: dict[str, Any] = {"name": "a", "version": "1", "vulns": []}
SKIPPED: dict[str, Any] = {"name": "b", "skip_reason": "not found on PyPI"}
BAD: dict[str, Any] = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ([GOOD], 0, "no known vulnerabilities in 1 packages"),
        ([GOOD, SKIPPED], 1, "1 of 2 packages were not audited: not found on PyPI"),
        ([GOOD, BAD], 1, "c 2: CVE-1, fixed in 2.1"),
        ([], 1, "no package was audited"),
    ],
)
def test_an_audit_that_looked_nothing_up_fails(found: list[dict[str, Any]], code: int, said: str) -> None:
    assert verdict(found) == (code, [said])
