"""Whose plan a site takes: one that a lead of its federation signed, who was not removed. The attacks are those of a
server, which passes plans on and may hold the kits of sites."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from masked_federation import authority_of, write_kit
from small_federation import changed, make_plan, write_data, write_model, write_site_file

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from flare_federation import LEAD
from nvflare.apis.signal import Signal
from site_executor import HELLO, ask, context_of, executor_of, lead_of, signed_on

from pf2lora.federation.flare import admin
from pf2lora.federation.flare.controller import FederationController
from pf2lora.federation.flare.executor import BODY, AllowListFilter, SiteExecutor
from pf2lora.federation.flare.keys import remove
from pf2lora.federation.flare.provision import Project, provision
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.identity import Authority, KitIdentity
from pf2lora.federation.protocol.messages import decode, encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import told
from pf2lora.federation.protocol.run_status import UNFINISHED, Status, read_status, write_status
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.signed_plan import REFUSALS, PlanRefused, SignedPlan

pytestmark = pytest.mark.usefixtures("one_thread")

MEMBER, SITE = "guest@example.org", "site-1"
Kits = dict[str, Path]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Kits:
    """Kits of `provision`, and of another project with the same names."""
    found: Kits = {}
    for name in ("trial", "other"):
        project = Project(name, "localhost", (SITE, "site-2"), port=18210, lead=LEAD, members=(MEMBER,))
        made = provision(project, tmp_path_factory.mktemp(name) / "kits")
        found |= made if name == "trial" else {f"other {who}": kit for who, kit in made.items()}
    return found


def identity(kit: Path) -> KitIdentity:
    """Who signs with the keys of a kit, the server's too."""
    startup = kit / "startup"
    if not (startup / "server.key").exists():
        return KitIdentity.of(startup)
    key = load_pem_private_key((startup / "server.key").read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    return KitIdentity(Authority.of(startup).root, (startup / "server.crt").read_text(), key)


def changed_since(kits: Kits, plan: Plan) -> SignedPlan:
    good = SignedPlan.by(identity(kits[LEAD]), plan)
    return replace(good, plan=changed(plan, rounds=99).to_json())


def signed_as_a_message(kits: Kits, plan: Plan) -> SignedPlan:
    """The lead's signature of the same text for something else."""
    lead = identity(kits[LEAD])
    return SignedPlan(plan.to_json(), lead.certificate, lead.sign(plan.to_json().encode()))


def dated_anew(kits: Kits, plan: Plan) -> SignedPlan:
    """An old signature with a new date."""
    return replace(signed_on(identity(kits[LEAD]), plan, time.time() - 1e7), signed_at=int(time.time()))


def with_the_leads_certificate(kits: Kits, plan: Plan) -> SignedPlan:
    return replace(SignedPlan.by(identity(kits[SITE]), plan), certificate=identity(kits[LEAD]).certificate)


def signed_by(name: str) -> Callable[[Kits, Plan], SignedPlan]:
    return lambda kits, plan: SignedPlan.by(identity(kits[name]), plan)


ATTACKS: dict[str, tuple[Callable[[Kits, Plan], SignedPlan], str]] = {
    "by nobody": (lambda kits, plan: SignedPlan(plan.to_json()), "signature"),
    "garbage": (lambda kits, plan: SignedPlan(plan.to_json(), "certificate", "signature"), "signature"),
    "by another project's lead": (signed_by(f"other {LEAD}"), "signature"),
    "changed since": (changed_since, "signature"),
    "signed as something else": (signed_as_a_message, "signature"),
    "by a site, with the lead's certificate": (with_the_leads_certificate, "signature"),
    "by another site": (signed_by("site-2"), "signer"),
    "by the site itself": (signed_by(SITE), "signer"),
    "by the server": (signed_by("server"), "signer"),
    "by a member": (signed_by(MEMBER), "signer"),
    "dated anew": (dated_anew, "signature"),
    "with its date as a text": (
        lambda kits, plan: replace(signed_by(LEAD)(kits, plan), signed_at=str(int(time.time()))),  # type: ignore[arg-type]
        "signature",
    ),
    "dated in advance": (
        lambda kits, plan: signed_on(identity(kits[LEAD]), plan, time.time() + 7200),
        "signed-later",
    ),
    "for other sites": (
        lambda kits, plan: SignedPlan.by(identity(kits[LEAD]), replace(plan, sites=("site-2", "site-3"))),
        "not-named",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_site_takes_no_plan_that_no_lead_has_signed(
    attack: str, kits: Kits, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, code = ATTACKS[attack]
    plan, kit = make_plan(sites=(SITE,)), tmp_path / "kit"
    write_site_file(
        kit / "local" / "site.toml", tmp_path, SITE
    )  # no data and no model are there to be loaded
    (kit / "startup").symlink_to(kits[SITE] / "startup")
    executor, context = SiteExecutor(**asdict(make(kits, plan))), context_of(SITE, kit / "local")
    for request in (HELLO, encode({"kind": "train", "round": 1})):
        reply = AllowListFilter().process(ask(executor, context, request), context)
        fields = decode(reply[BODY]).fields
        assert fields == {"kind": "problem", "round": 1, "code": code}
        assert told(fields, plan) == REFUSALS[code]  # what the server makes of it
    assert f"pf2lora: {SITE}: {REFUSALS[code]}" in capfd.readouterr().err
    lines = [json.loads(line) for line in (kit / audit.FILE).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["stays out", "sent", "sent"] and lines[0]["code"] == code
    assert executor.plan is None and not (tmp_path / "state").exists() and not (kit / "runs").exists()


def test_the_leads_signature_is_known_by_every_kit_and_goes_along_with_the_job(
    kits: Kits, tmp_path: Path
) -> None:
    plan = make_plan("homlora")
    job = admin.write_job(plan, SignedPlan.by(identity(kits[LEAD]), plan), tmp_path)
    for side in ("client", "server"):
        (found,) = json.loads((job / "app" / "config" / f"config_fed_{side}.json").read_text())[
            "executors" if side == "client" else "workflows"
        ]
        carried = SignedPlan(**found.get("executor", found)["args"])
        for name in (SITE, "server"):
            assert carried.lead(Authority.of(kits[name] / "startup"), ()) == LEAD
        with pytest.raises(PlanRefused, match="was removed"):
            carried.lead(Authority.of(kits[SITE] / "startup"), [LEAD])
        assert Plan.from_json(carried.plan) == plan


def test_a_certificate_that_has_ended_signs_no_plan(tmp_path: Path) -> None:
    lead = write_kit(tmp_path / "lead", LEAD, authority_of(tmp_path), days=-1, role="lead")
    with pytest.raises(PlanRefused, match="not in date: submit it again with a renewed kit"):
        SignedPlan.by(lead, make_plan()).lead(lead, ())


def test_a_site_that_removes_a_lead_takes_no_more_of_its_messages_and_readmits_it(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path, (SITE,))
    kit = tmp_path / "kit"
    local = write_site_file(kit / "local" / "site.toml", tmp_path, SITE).parent
    executor, context = executor_of(make_plan(sites=(SITE,)), kit), context_of(SITE, local)
    (kit / "startup" / "fed_client.json").touch()
    assert decode(ask(executor, context, HELLO)[BODY]).kind == "hello"
    said = next(json.loads(line) for line in (kit / audit.FILE).read_text().splitlines())
    assert (said["event"], said["lead"]) == ("takes part", "lead@example.org")
    remove(kit, "lead@example.org")
    train = encode({"kind": "train", "round": 1})
    for request in (train, HELLO):
        assert decode(ask(executor, context, request)[BODY]).fields["code"] == "signer-removed"
    remove(kit, "lead@example.org", back=True)
    assert decode(ask(executor, context, HELLO)[BODY]).kind == "hello"
    assert decode(ask(executor, context, train)[BODY]).kind == "update"


# --- the server --------------------------------------------------------------------------------------------


def controlled(root: Path, signed: SignedPlan) -> FederationController:
    """The job of a plan, carried out as far as it goes without a site."""
    made = FederationController(**asdict(signed))
    made.root, made.folder = root, root / "run"
    made.folder.mkdir(exist_ok=True)
    context: Any = SimpleNamespace(get_job_id=lambda: "job-1")
    made.control_flow(Signal(), context)
    return made


def test_a_server_runs_no_plan_that_no_lead_has_signed_and_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    lead_of(tmp_path)
    plan = make_plan("homlora")
    ServerSession(plan, tmp_path / "run")
    bad = replace(SignedPlan.by(lead_of(tmp_path), plan), plan=changed(plan, rounds=99).to_json())
    made = controlled(tmp_path, bad)
    assert (made.status.state, made.status.line) == ("failed", REFUSALS["signature"])
    assert read_status(tmp_path / "run") is None
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == json.loads(plan.to_json())


def test_a_removed_leads_run_stops(tmp_path: Path) -> None:
    plan, lead = make_plan("homlora"), lead_of(tmp_path)
    (tmp_path / "startup" / "fed_server.json").touch()
    remove(tmp_path, "lead@example.org")
    made = controlled(tmp_path, SignedPlan.by(lead, plan))
    status = read_status(tmp_path / "run")
    assert status is not None and (status.state, status.line) == ("stopped", REFUSALS["signer-removed"])
    with pytest.raises(PlanRefused):  # and one that runs, before its next round
        made.run_rounds()


@pytest.mark.parametrize("ends", ["expired", "removed"])
def test_a_run_whose_lead_is_none_any_more_stops_between_two_jobs(tmp_path: Path, ends: str) -> None:
    """What began it goes on no more when the server is started again: its state is none that is unfinished."""
    days = -1 if ends == "expired" else 10
    lead = write_kit(tmp_path / "startup", LEAD, authority_of(tmp_path), days=days, role="lead")
    (tmp_path / "startup" / "fed_server.json").touch()
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", Status("continue", 2, 3, job="job-0"))
    if ends == "removed":
        remove(tmp_path, LEAD)
    controlled(tmp_path, SignedPlan.by(lead, make_plan("homlora")))
    status = read_status(tmp_path / "run")
    assert status is not None and status.state not in UNFINISHED
    assert (status.state, status.job, status.line) == ("stopped", "job-1", REFUSALS[f"signer-{ends}"])
