"""A person at a site approves what they were shown, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_federation import make_plan
from typer.testing import CliRunner

from pf2lora.cli.federation import app
from pf2lora.errors import UserError
from pf2lora.federation.protocol import approvals

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    (tmp_path / "kit" / "startup").mkdir(parents=True)
    (tmp_path / "kit" / "startup" / "fed_client.json").touch()
    (tmp_path / "kit" / "local").mkdir()
    (tmp_path / "kit" / "local" / "policy.toml").write_text("approve = true")
    return tmp_path / "kit"


def shown(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    if isinstance(result.exception, UserError):
        return f"error: {result.exception}"
    assert result.exit_code == 0, result.output
    return result.output


def test_a_person_approves_a_plan_and_no_other(kit: Path) -> None:
    plan, local = make_plan("homlora"), kit / "local"
    assert shown("approve", str(kit)) == "no run waits for an approval\n"
    assert not approvals.is_approved(local, plan)
    listed = shown("approve", str(kit))
    assert 'method = "homlora"' in listed and "batch_size = 4" in listed
    asks = "homlora on classification, 3 rounds of 2 steps, batches of 4, rank 4, with site-1, site-2, site-3, site-4"
    assert f"# trial: {asks}; the server sees each update; no differential privacy" in listed
    assert shown("approve", str(kit), "trial") == listed  # nothing is approved that nobody named
    assert not approvals.is_approved(local, plan)
    said = shown(*approval_in(listed))
    assert "is approved by" in said and asks in said
    assert approvals.is_approved(local, plan)
    assert approvals.is_approved(local, make_plan("homlora", deadline=5.0))  # what only the server does
    assert shown("approve", str(kit)) == "no run waits for an approval\n"
    longer = make_plan("homlora", config={"rounds": 30})
    assert not approvals.is_approved(local, longer)
    assert "rounds = 30" in shown("approve", str(kit))
    assert approvals.is_approved(local, plan)  # nobody took that back


def approval_in(listed: str) -> list[str]:
    """The command that the list ends with, as a person copies it."""
    (line,) = [line for line in listed.splitlines() if line.startswith("# approve with")]
    return line.split("`")[1].removeprefix("pf2lora federation ").split()


def test_what_was_asked_for_after_a_person_looked_is_not_approved(kit: Path) -> None:
    plan, greedy = make_plan("homlora"), make_plan("homlora", config={"rounds": 1000, "batch_size": 1})
    approvals.is_approved(kit / "local", plan)
    command = approval_in(shown("approve", str(kit)))
    approvals.is_approved(kit / "local", greedy)  # the lead submits another one under the same name
    assert "is not the one that is asked for now: look at that first" in shown(*command)
    assert not approvals.is_approved(kit / "local", greedy) and not approvals.is_approved(kit / "local", plan)
    assert "1000 rounds of 2 steps, batches of 1" not in shown(*command[:-1], "0" * 64)


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda kit: (kit / "local" / "policy.toml").unlink(), "asks for no approval"),
    (lambda kit: (kit / "startup" / "fed_client.json").unlink(), "is no site's kit"),
    (lambda kit: None, "no run 'trial' was asked for here"),
]


@pytest.mark.parametrize(("breaks", "line"), BROKEN)
def test_what_cannot_be_approved_is_one_line(kit: Path, breaks: Callable[[Path], object], line: str) -> None:
    breaks(kit)
    assert line in shown("approve", str(kit), "trial", "--plan", "0" * 64)


def test_a_damaged_approval_is_one_line(kit: Path) -> None:
    (kit / "local" / "approvals").mkdir()
    (kit / "local" / "approvals" / "trial.json").write_text(json.dumps({"plan": 3}))
    assert shown("approve", str(kit)).startswith("error: ")
