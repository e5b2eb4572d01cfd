"""What a site chooses by its own validation rows: sizes, its best round, what it deploys; and when a run ends."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_federation import (
    SITES,
    Small,
    changed,
    local_outcome,
    local_run,
    local_trial,
    make_plan,
    make_small,
)
from validated_federation import AUTO, HALF, PRUNES, close, common_of, record_of

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.signal import Signal
from site_executor import controller_of

from pf2lora.federation.flare.rehearse import write_site
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.checkpoints import BEST
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.run_status import read_lines, read_status
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.site_models import choice_file
from pf2lora.federation.protocol.site_setup import load_client, site_config, state_folder
from pf2lora.federation.protocol.stopping import middle_loss, out_of_patience
from pf2lora.run.result import Choice

pytestmark = pytest.mark.usefixtures("one_thread", "sized_every_round")


def choice_of(small: Small, site: str) -> Choice:
    file = choice_file(state_folder(small.plan, small.files[site]), site)
    return Choice(**json.loads(file.read_text()))


def exported(small: Small, site: str) -> dict[str, torch.Tensor]:
    folder = state_folder(small.plan, small.files[site])
    return load_file(folder / "state" / "clients" / f"{site}.safetensors")


def check_same_choice(found: Choice, expected: Choice) -> None:
    assert (found.candidate, found.round) == (expected.candidate, expected.round)
    assert found.validation_loss == close(expected.validation_loss)
    assert found.last_round == close(expected.last_round)


# --- the local engine's choices -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [{}, HALF], ids=["all", "half-by-size"])
@pytest.mark.parametrize("method", ["pf2lora", "pf2lora-joint"])
def test_sites_find_the_sizes_that_the_local_engine_finds(
    tmp_path: Path, method: str, variant: dict[str, Any]
) -> None:
    plan = make_plan(method, config=AUTO | variant)
    small = make_small(tmp_path, plan)
    small.run()
    state, common, _ = local_run(tmp_path, plan)
    assert small.coordinator.common is not None and small.setups["site-1"].method.resizes
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):
        own = small.sessions[site].folder.newest_before(99, small.setups[site].initial).state
        assert (own.y[0] - state.y[k]).abs().max() <= 1e-5
    local, trial = local_outcome(tmp_path, plan)
    found, expected = record_of(small, trial), local.record
    for ours, theirs in zip(found.rounds, expected.rounds, strict=True):
        assert ours.validation_loss == close(theirs.validation_loss)
        assert ours.served is not None and theirs.served is not None
        assert all(ours.served[metric] == close(values) for metric, values in theirs.served.items())
        trained = [k for k, loss in enumerate(ours.train_loss) if loss is not None]
        for metric, values in (theirs.before_averaging or {}).items():
            before = (ours.before_averaging or {})[metric]
            assert [before[k] for k in trained] == close([values[k] for k in trained])


def test_without_resizing_the_numbers_would_be_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above could not see a difference if no size were ever changed."""
    plan = make_plan("pf2lora", config=AUTO)
    _, common, trial = local_run(tmp_path / "a", planted(tmp_path / "a", plan))
    kind = type(trial.method)
    monkeypatch.setattr(kind, "resize", lambda self, s, judge, serving=False: s)
    _, other, _ = local_run(tmp_path / "a", plan)
    assert (common - other).abs().max() > 1e-3


def planted(root: Path, plan: Plan) -> Plan:
    """The plan, with its sites' files under `root`."""
    make_small(root, plan)
    return plan


@pytest.mark.parametrize("method", ["pf2lora", "hetlora", "per-fedavg", "local"])
@pytest.mark.parametrize("keep", ["best", "last"])
def test_sites_deploy_what_clients_of_a_local_run_deploy(tmp_path: Path, method: str, keep: str) -> None:
    plan = make_plan(method, config=AUTO | PRUNES | {"keep": keep, "lr": 0.03})
    small = make_small(tmp_path, plan)
    small.run()
    local, trial = local_outcome(tmp_path, plan)
    found, expected = record_of(small, trial), local.record
    assert found.choices is not None and expected.choices is not None
    assert found.deploy is not None and expected.deploy is not None
    for ours, theirs in zip(found.choices, expected.choices, strict=True):
        check_same_choice(ours, theirs)
    for metric, table in expected.deploy.items():
        assert found.deploy[metric].per_client == close(table.per_client)
    for k, site in enumerate(SITES):
        kept = exported(small, site)
        for part, layout, rows in (
            ("common", trial.model.common_layout, local.common_of_client),
            ("personal", trial.model.personal_layout, local.personal_of_client),
        ):
            for name, tensor in layout.unpack(rows[k : k + 1]).items():
                assert (kept[f"{part}.{name}"] - tensor[0]).abs().max() <= 2e-5


def test_a_site_that_was_not_asked_chooses_by_its_own_last_round(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", config=AUTO | HALF | {"evaluate_every": 4})
    small = make_small(tmp_path, plan)
    small.run()
    local, _ = local_outcome(tmp_path, plan)
    asked = small.coordinator.chosen(4)
    assert 0 < len(asked) < len(SITES) and local.record.choices is not None
    for site, expected in zip(SITES, local.record.choices):
        found = choice_of(small, site)
        assert found.last_round["served"] == close(expected.last_round["served"])
        if site in asked:
            check_same_choice(found, expected)
        else:
            assert "before_averaging" in found.last_round


def test_a_site_without_validation_rows_deploys_what_it_is_served(tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:2], config=AUTO)
    small = make_small(tmp_path, plan)
    alone = small.files["site-2"]
    lines = [line for line in alone.read_text().splitlines() if not line.startswith("validation")]
    again = str(tmp_path / "again")
    alone.write_text("\n".join([*lines, "validation_ratio = 0.0\n"]).replace(str(tmp_path / "state"), again))
    first = small.files["site-1"]
    first.write_text(first.read_text().replace(str(tmp_path / "state"), again))
    small = Small(plan, tmp_path / "run", small.files)
    small.run()
    assert not small.setups["site-2"].method.resizes  # there is nothing to find a size by
    final = json.loads((tmp_path / "run" / "server" / "final.json").read_text())
    assert {"deploy", "validation"} <= set(final["site-1"])
    assert set(final["site-2"]) == {"kind", "round", "served"}
    found = record_of(small, local_trial(tmp_path, plan))
    assert found.choices is not None and found.deploy is not None
    assert found.choices[1] == Choice("served", 4, None, {})
    assert found.deploy["accuracy"].per_client[1] == found.served["accuracy"].per_client[1]


# --- across restarts ----------------------------------------------------------------------------------------


def killed(small: Small) -> None:
    """New processes for all, from what is on their disks."""
    for session in small.sessions.values():
        session.folder.close()
    small.start_server()
    small.sessions = {site: small.start_site(site) for site in small.files}


@pytest.mark.parametrize("method", ["pf2lora", "hetlora"])
def test_a_site_that_is_killed_chooses_the_same(tmp_path: Path, method: str) -> None:
    """It is killed in every round, also between its own answer and the server's note of it."""
    plan = make_plan(method, config=AUTO | PRUNES | {"lr": 0.05})
    straight, broken = make_small(tmp_path / "straight", plan), make_small(tmp_path / "broken", plan)
    straight.run()
    broken.greet()
    every = set(range(1, 5))
    while not broken.coordinator.over:
        broken.ask(broken.coordinator.requests(list(SITES), every))  # its answers are lost
        killed(broken)
        broken.greet()
        broken.round()
    broken.ask(broken.coordinator.finish_requests(list(SITES)))
    killed(broken)
    broken.run()
    rounds = set()
    for site in SITES:
        assert choice_of(broken, site) == choice_of(straight, site)
        for name, tensor in exported(straight, site).items():
            assert torch.equal(tensor, exported(broken, site)[name])
        ours, theirs = (run.sessions[site].folder.read(BEST, 4) for run in (broken, straight))
        assert ours[1] == theirs[1]
        assert all(torch.equal(ours[0][name], tensor) for name, tensor in theirs[0].items())
        rounds.add(json.loads(theirs[1]["which"])[1])
    assert rounds != {4}  # somebody's best is of a round that it had to remember
    (shared, number), (straight_on, expected) = (common_of(run) for run in (broken, straight))
    assert number == expected and shared is not None and straight_on is not None
    assert torch.equal(shared, straight_on)


def test_the_best_model_is_not_of_a_round_that_the_server_lost(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("pf2lora", config=AUTO))
    small.run()
    folder = small.sessions["site-1"].folder
    assert folder.rounds(BEST) == [2, 3, 4]
    assert folder.newest(BEST, 3) == 2
    assert folder.rounds(BEST) == [2, 3, 4]  # nothing is deleted


# --- what leaves --------------------------------------------------------------------------------------------


def test_of_validation_only_the_declared_sums_leave(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("pf2lora", config=AUTO | HALF))
    small.run()
    sent = b"".join(data for _, data in small.messages)
    seen = set()
    for _, data in small.messages:
        fields = messages.decode(data).fields
        seen |= set(fields)
        if "validation" in fields:
            assert set(fields["validation"]) == {"rows", "loss", "common"}
    assert {"validation", "deploy"} <= seen
    trained = {"kind", "round", "steps", "loss", "second_order"}
    scored = {"served", "before", "deploy", "validation"}
    assert seen <= trained | scored | set(small.setups["site-1"].facts)
    for k, site in enumerate(SITES):
        folder = small.sessions[site].folder
        rows = (tmp_path / "validation" / f"{site}.jsonl").read_text().splitlines()
        assert len(rows) == 12 + k
        for row in rows:
            assert json.loads(row)["text"].encode() not in sent
        for number in folder.rounds(BEST):
            losses = folder.read(BEST, number)[0]["losses"][0]
            assert not any(repr(loss).encode() in sent for loss in losses.tolist())
            assert losses[:1].numpy().tobytes() not in sent
    final = json.loads((tmp_path / "server" / "final.json").read_text())
    assert final["site-2"]["validation"]["rows"] == 13
    assert repr(final["site-2"]["validation"]["loss"]).encode() in sent  # the search finds what is there


# --- the end ------------------------------------------------------------------------------------------------


def hopeless(**changes: Any) -> Plan:
    """A run whose validation loss soon rises."""
    return make_plan("pf2lora", config=AUTO | {"rounds": 9, "lr": 0.3, "patience": 2} | changes)


def test_patience_ends_a_run_by_the_median_of_the_losses_that_a_local_run_has(tmp_path: Path) -> None:
    plan = hopeless()
    small = make_small(tmp_path, plan)
    small.run()
    local, trial = local_outcome(tmp_path, changed(plan, patience=9))
    told = [[loss or 0.0 for loss in r.validation_loss or []] for r in local.record.rounds]
    losses = [statistics.median(each) for each in told]
    best = [losses.index(min(losses[: k + 1])) for k in range(len(losses))]
    last = next(k for k in range(len(losses)) if k - best[k] >= 2) + 1
    assert last < 8
    assert small.coordinator.done == last + 1  # what a round served is measured when the next one begins
    found = record_of(small, trial)
    assert [r.round for r in found.rounds] == list(range(1, last + 2))
    assert found.rounds[-1].served is not None and found.rounds[-1].validation_loss is not None
    assert ServerSession(plan, tmp_path / "server").over
    assert not ServerSession(changed(plan, patience=9), tmp_path / "server").over  # it may go on


def test_one_sites_loss_does_not_end_everybodys_run() -> None:
    falling = [{site: {"validation": {"rows": 2, "loss": 2.0 / n}} for site in SITES} for n in range(1, 7)]
    for answers in falling[2:]:
        answers["site-2"] = {"validation": {"rows": 1, "loss": 1e300}}
    losses = [middle_loss(answers) for answers in falling]
    assert losses == [1 / n for n in range(1, 7)]
    assert middle_loss({"site-1": {"steps": 2}}) is None
    training = hopeless().run.training
    assert not out_of_patience(training, [1 / n for n in range(1, 7)])
    assert out_of_patience(training, [1.0, 0.5, 0.7, 0.6])


def test_the_server_says_why_a_run_ended_early(tmp_path: Path) -> None:
    plan = hopeless()
    small = make_small(tmp_path, plan)
    controller = controller_of(plan, tmp_path / "run")
    controller.session = ServerSession(plan, controller.folder)
    controller.abort = Signal()
    controller.status.job = "job"
    engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=site) for site in SITES])
    controller.fl_ctx = SimpleNamespace(get_engine=lambda: engine)
    answers: Any = lambda name, requests, timeout, take=None: small.ask(requests)  # noqa: E731
    controller.exchange = answers  # type: ignore[method-assign]
    controller.collect_hellos()
    controller.hand_out = lambda: None  # type: ignore[method-assign]
    controller.run_rounds()
    done = controller.session.done
    why = f"stopped after round {done} of 9: the median validation loss did not fall for 2 evaluations"
    status = read_status(controller.folder)
    assert status is not None and (status.state, status.round, status.line) == ("finished", done, why)
    assert read_lines(controller.folder)[-1] == f"run 'trial' finished: {done} rounds; {why}"


# --- a rehearsal's sites ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [("test",), ("test", "validation"), ()])
@pytest.mark.parametrize("ratio", [0.1, 0.0])
def test_a_rehearsals_site_has_the_rows_of_a_local_run(
    tmp_path: Path, parts: tuple[str, ...], ratio: float
) -> None:
    plan = make_plan("homlora", config={"personal_steps": None})
    make_small(tmp_path, plan)
    small_plan = Plan.of(plan.run, "trial", plan.sites, plan.labels)
    trial = local_trial(tmp_path, small_plan, parts, validation_ratio=ratio)
    for client in trial.workload.clients:
        kit = tmp_path / "kits" / client.name
        (kit / "local").mkdir(parents=True)
        write_site(client, trial.workload.config, tmp_path / "rehearsal" / client.name, kit)
        config, own = site_config(plan, kit / "local" / "site.toml")
        assert load_client(config, plan, own.name)[0] == client
        assert bool(client.validation) == (ratio > 0 or "validation" in parts)
