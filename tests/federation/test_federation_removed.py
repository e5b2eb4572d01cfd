"""Who was removed: they neither log in nor go on, at the server and at a site, and their runs stop."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_federation import make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from flare_federation import LEAD, Flare, flare
from nvflare.apis.event_type import EventType
from nvflare.fuel.hci.proto import InternalCommands
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import ServerCommandRegister
from nvflare.private.fed.server.fed_server import FederatedServer
from typer.testing import CliRunner

from pf2lora.cli.federation import app
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, processes
from pf2lora.federation.flare.keys import remove
from pf2lora.federation.flare.logins import RemovedPeople, keep_out
from pf2lora.federation.flare.provision import Project, provision
from pf2lora.federation.flare.rehearse import listening
from pf2lora.federation.flare.resumer import STARTING, RunResumer
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.signed_plan import REFUSALS

pytestmark = pytest.mark.usefixtures("one_thread")

MEMBER, SITE = "guest@example.org", "site-1"
Kits = dict[str, Path]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    project = Project("trial", "localhost", (SITE, "site-2"), port=18210, lead=LEAD, members=(MEMBER,))
    return provision(project, tmp_path_factory.mktemp("trial") / "kits")


class Asked(dict[str, Any]):
    """A command's connection, as far as the filter looks at it."""

    def __init__(self, user: str = "") -> None:
        super().__init__({ConnProps.USER_NAME: user})
        self.said: list[str] = []
        self.append_string = self.append_error = self.said.append

    def get_prop(self, name: str) -> Any:
        return self.get(name)


def test_a_removed_person_neither_logs_in_nor_goes_on_with_a_session(tmp_path: Path) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_server.json").touch()
    told: list[str] = []
    people: Any = RemovedPeople(tmp_path, told.append)
    login = [InternalCommands.CERT_LOGIN, LEAD]
    assert people.pre_command(Asked(), login) and people.pre_command(Asked(LEAD), ["submit_job", "x"])
    remove(tmp_path, LEAD)
    for user, command in (("", login), (LEAD, ["submit_job", "x"]), (LEAD, ["list_jobs"])):
        asked = Asked(user)
        assert not people.pre_command(asked, command)
        assert f"{LEAD} was removed" in asked.said[0]
    assert people.pre_command(Asked(MEMBER), ["list_jobs"])
    assert told == [LEAD] * 3
    remove(tmp_path, LEAD, back=True)
    assert people.pre_command(Asked(), login)


def test_a_server_whose_commands_pass_no_filter_ends_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with another FLARE, which would set up what reads commands in another way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    reads = SimpleNamespace(cmd_reg=ServerCommandRegister(None))
    made, fed = RunResumer(), FederatedServer.__new__(FederatedServer)
    context: Any = SimpleNamespace(
        get_engine=lambda: SimpleNamespace(server=fed),
        get_peer_context=lambda: None,
        get_prop=lambda name: None,
    )
    keep_out(fed, made.people)
    fed.set_admin_server(reads)  # as FLARE 2.9.0 does it
    made.began -= 2 * STARTING
    made.handle_event(EventType.CLIENT_HEARTBEAT_PROCESSED, context)
    fed.admin_server = SimpleNamespace(cmd_reg=ServerCommandRegister(None))
    for event in (EventType.CLIENT_REGISTER_RECEIVED, EventType.CLIENT_HEARTBEAT_PROCESSED):
        with pytest.raises(SystemExit):
            made.handle_event(event, context)
    assert "does not let pf2lora refuse removed people" in capsys.readouterr().err
    made.began += 2 * STARTING  # it may not be there yet
    made.handle_event(EventType.CLIENT_HEARTBEAT_PROCESSED, context)


SAID = {
    ("server", MEMBER): "runs that guest@example.org submitted stop after their round",
    (SITE, MEMBER): "no plan of guest@example.org's is taken here",
    ("server", "site-2"): "is let in no more",
    (SITE, "site-2"): "is in no masked sum with this site",
}


@pytest.mark.parametrize(("where", "who"), SAID)
def test_people_and_sites_are_removed_at_the_server_and_at_a_site(where: str, who: str, kits: Kits) -> None:
    done = CliRunner().invoke(app, ["remove", who, "--kit", str(kits[where])])
    assert done.exit_code == 0 and SAID[where, who] in " ".join(done.output.split())
    assert removed(kits[where]) == [who]
    done = CliRunner().invoke(app, ["readmit", who, "--kit", str(kits[where])])
    assert done.exit_code == 0 and removed(kits[where]) == []
    with pytest.raises(UserError, match="is no kit of the server or a site"):
        remove(kits[LEAD], who)


@pytest.mark.slow
def test_people_who_are_removed_from_a_federation_that_runs(tmp_path: Path) -> None:
    """At a site: it alone is left out, with the same line at both ends. At the server: who logs in is refused in a
    line, and the run stops, also when the server is started again; readmitted, the lead goes on with it."""
    plan = make_plan("homlora", (SITE, "site-2"), config={"rounds": 400}, deadline=60)
    with flare(tmp_path, plan) as run:
        run.start("server", *plan.sites)
        remove(run.kits[SITE], LEAD)
        run.submit()
        run.wait(lambda: run.round() >= 2, 180, "rounds")
        assert run.says(f"{SITE} is left out: cannot take part: {REFUSALS['signer-removed']}")
        assert REFUSALS["signer-removed"] in run.log(SITE)
        with admin.session(run.kits[LEAD]) as session:
            assert session.list_jobs()
            remove(run.kits["server"], LEAD)
            with pytest.raises(Exception, match=r"removed|not authenticated|AUTH_REMOVED"):
                session.list_jobs()
        refused_to_log_in(run)
        run.wait(lambda: run.state() == "stopped", 60, "the run to stop")
        stopped = run.round()
        assert run.says(REFUSALS["signer-removed"]) and f"{LEAD} was refused" in run.log("server")
        run.kill("server")
        run.start("server")
        run.wait(lambda: listening(processes.open_kit(run.kits["server"]).port), 60, "the server")
        refused_to_log_in(run)
        assert (run.state(), run.round()) == ("stopped", stopped)
        remove(run.kits["server"], LEAD, back=True)
        run.kill("server")  # which lets in again when it is started
        run.start("server")
        run.wait(lambda: let_in(run), 60, "the lead to be let in")
        admin.resume_run(run.kits[LEAD], plan.name)
        run.wait(lambda: run.round() > stopped, 120, "the run to go on")
        admin.stop_run(run.kits[LEAD], plan.name)


def refused_to_log_in(run: Flare) -> None:
    with pytest.raises(UserError, match=rf"^{LEAD} was removed from the federation at "):
        admin.runs(run.kits[LEAD])


def let_in(run: Flare) -> bool:
    with suppress(UserError):  # it may not listen yet
        return bool(admin.runs(run.kits[LEAD]))
    return False
