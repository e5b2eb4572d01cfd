"""A site's own limits: what breaks one is refused, and site and lead read the same line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_federation import SITES, Small, changed, local_run, make_plan, make_small

from pf2lora.engines.batches import batch_rows
from pf2lora.errors import UserError
from pf2lora.federation.protocol import approvals, messages
from pf2lora.federation.protocol.allow_list import AllowList
from pf2lora.federation.protocol.batch_secret import FILE, private_seed, read_secret
from pf2lora.federation.protocol.checkpoints import StateFolderError
from pf2lora.federation.protocol.ledger import Ledger
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import (
    LIMITS,
    Policy,
    PolicyBroken,
    check_plan,
    read_policy,
    refusal,
    spending,
    to_toml,
)
from pf2lora.federation.protocol.problems import PROBLEMS, problem_fields
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.site_setup import build
from pf2lora.federation.protocol.wire import Wire
from pf2lora.settings import settings_of

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site.toml of a site with data and model; the policy beside it is each test's."""
    small = make_small(tmp_path_factory.mktemp("site"), make_plan("homlora", SITES[:2]))
    return small.files[SITES[0]]


def refused(file: Path, policy: str, plan: Plan, tmp_path: Path) -> str:
    """The line that the site logs; what the lead reads is checked to be the same."""
    file.with_name("policy.toml").write_text(policy)
    with pytest.raises(PolicyBroken) as error:
        build(plan, file, SITES[0])
    fields = {"kind": "problem", "round": 1} | problem_fields(error.value)
    assert fields["code"] == "policy"
    server = ServerSession(plan, tmp_path / "server")
    with pytest.raises(UserError) as told:
        server.register(SITES[0], messages.encode(fields))
    assert str(told.value) == f"{SITES[0]} cannot take part: {error.value} (its own log says more)"
    return str(error.value)


@pytest.mark.parametrize(
    ("policy", "config", "line"),
    [
        ("", {"batch_size": 1}, "its policy's min_batch_size is 4, and the run's smallest batch is 1"),
        ("", {"steps": 1}, "its policy's min_steps is 2, and the run's steps a round are 1"),
        (
            "",
            {"steps": 1, "batch_size": 1},
            "its policy's min_batch_size is 4, and the run's smallest batch is 1",
        ),
        ("min_rows = 9", {}, "its policy's min_rows is 9, and the run's steps × batch_size are 8"),
        ("min_rows = 41", {"batch_size": 30}, "its policy's min_rows is 41, and it has fewer training rows"),
        ("max_rounds = 2", {}, "its policy's max_rounds is 2, and the run's rounds are 3"),
        ("max_runs = 0", {}, "its policy's max_runs is 0, and it has taken part in so many runs"),
        ("max_epsilon = 8", {}, "its policy's max_epsilon is 8, and the run has no differential privacy"),
        (
            "max_epsilon = 8",
            {"dp_epsilon": 8.0, "dp_delta": 0.3},
            "its policy's max_delta is 1e-05, and the run's δ is 0.3",
        ),
        (
            "max_epsilon = 8\nmax_delta = 0.001",
            {"dp_epsilon": 8.0, "dp_delta": 0.01},
            "its policy's max_delta is 0.001, and the run's δ is 0.01",
        ),
        ("masked = true", {}, "its policy allows masked runs alone (--masked)"),
        ('tasks = ["generation"]', {}, "its policy does not allow the task 'classification'"),
        ('methods = ["pf2lora", "local"]', {}, "its policy does not allow the method 'homlora'"),
        ('sites = ["site-1", "site-3"]', {}, "its policy does not allow all of the run's sites"),
        ('models = ["roberta-base"]', {}, "its policy does not allow its base model"),
        (
            "approve = true",
            {},
            "a person there must approve the run first (`pf2lora federation approve` at the site)",
        ),
    ],
)
def test_every_limit_is_kept(
    site: Path, tmp_path: Path, policy: str, config: dict[str, Any], line: str
) -> None:
    if "dp_epsilon" in config:
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    plan = make_plan("homlora", SITES[:2], config=config)
    assert refused(site, policy, plan, tmp_path) == line


def test_the_second_order_batch_is_a_batch(site: Path, tmp_path: Path) -> None:
    plan = make_plan("pf2lora", SITES[:2], config={"zeta_size": 1})
    assert (
        refused(site, "", plan, tmp_path)
        == "its policy's min_batch_size is 4, and the run's smallest batch is 1"
    )
    own = make_plan("pf2lora", SITES[:2], config={"methods": {"pf2lora": {"zeta_size": 2}}})
    assert "the run's smallest batch is 2" in refused(site, "", own, tmp_path / "own")


def test_what_is_allowed_is_taken(site: Path) -> None:
    file = site.with_name("policy.toml")
    plan = make_plan("homlora", SITES[:2])
    file.write_text("")
    digest = build(plan, site, SITES[0]).facts["model"]
    model = f'models = ["other", "{digest}"]'
    named = 'methods = ["homlora"]\ntasks = ["classification"]\n'
    for text in (
        model,
        'sites = ["site-3", "site-2", "site-1"]',
        named + "max_rounds = 3\nmin_steps = 2\nmin_batch_size = 4\nmin_rows = 8\nmax_runs = 1\n",
    ):
        file.write_text(text)
        assert build(plan, site, SITES[0]).facts["model"] == digest


def test_a_delta_takes_no_more_of_the_noise_than_the_site_allows(site: Path) -> None:
    """At δ = 0.3 an ε of 8 would take less than a fifth of the noise."""
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    plans = [
        make_plan("homlora", SITES[:2], config={"dp_epsilon": 1.0, "dp_delta": delta})
        for delta in (1e-5, 0.3)
    ]
    costs = [spending(plan) for plan in plans]
    assert costs[0] is not None and costs[1] is not None and costs[1].noise < costs[0].noise / 5
    policy = Policy(max_epsilon=8.0)
    check_plan(policy, plans[0], 0)
    check_plan(Policy(), plans[1], 0)  # which takes runs without any noise
    with pytest.raises(PolicyBroken, match="max_delta"):
        check_plan(policy, plans[1], 0)


def test_a_runs_name_is_one_plan_so_that_nothing_begins_anew(site: Path, tmp_path: Path) -> None:
    """The rounds, runs and ε of a site are counted by names. A plan may go on for longer, and before its first round be
    mended."""
    site.with_name("policy.toml").write_text("")
    plan, other = (
        replace(make_plan("homlora", SITES[:2], config={"lr": lr}), name="mended") for lr in (0.01, 0.02)
    )
    for asked in (plan, other, plan):
        setup = build(asked, site, SITES[0])
    setup.ledger.begin_training(1)
    build(changed(plan, rounds=30), site, SITES[0])
    with pytest.raises(StateFolderError, match="the run 'mended' exists with another config") as error:
        build(other, site, SITES[0])
    assert problem_fields(error.value) == {"code": "plan"}
    assert "choose another --name" in PROBLEMS["plan"]
    build(plan, site, SITES[0])
    setup.ledger.file.unlink()


def test_runs_are_counted_by_the_ledger_whatever_was_cleaned_up(site: Path, tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:2])
    other = replace(plan, name="other")
    site.with_name("policy.toml").write_text("max_runs = 1")
    trained = build(plan, site, SITES[0]).ledger
    idle = Ledger(trained.file.parents[1], other, SITES[0], 0)
    idle.take()
    trained.begin_training(1)
    build(plan, site, SITES[0])  # the run itself, and one in which nothing was done
    assert "max_runs is 1" in refused(site, "max_runs = 1", other, tmp_path)
    idle.begin_training(1)
    assert "max_runs is 1" in refused(site, "max_runs = 1", plan, tmp_path / "again")
    for entry in (trained, idle):
        entry.file.unlink()  # which is how its keeper forgets a run


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("min_step = 2", "min_steps"),
        ("min_rows = 0", "min_rows is 0; it must be above 0"),
        ("max_runs = -1", "max_runs is -1"),
        ("max_repeats = -1", "max_repeats is -1"),
        ("max_plan_days = 0", "max_plan_days is 0; it must be above 0"),
        ("min_sites = 1", "min_sites is 1; a sum of fewer than 2 hides nothing"),
        ("min_rows = 2.5", "min_rows must be of type int"),
        ("max_epsilon = -1.0", "max_epsilon is -1.0"),
        ("max_delta = 0.0", "max_delta is 0.0; it must be above 0"),
        ("max_delta = 1.0", "max_delta is 1.0; it is a probability, below 1"),
        ('methods = ["fedavg2"]', "unknown method"),
        ('tasks = ["translation"]', "unknown task"),
        ('metrics = ["a;b"]', "no score's name"),
        ('sites = ["server"]', "taken by the federation itself"),
        ('approve = "yes"', "approve must be of type bool"),
        ("[limits]\n", "unknown key 'limits'"),
    ],
)
def test_a_bad_policy_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(UserError, match=line):
        read_policy(tmp_path / "policy.toml")


def test_the_file_that_a_kit_has_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(to_toml(Policy()))
    assert read_policy(tmp_path / "policy.toml") == Policy() == read_policy(tmp_path / "none.toml")
    changed = Policy(max_epsilon=4.0, methods=("pf2lora",), approve=True)
    (tmp_path / "policy.toml").write_text(to_toml(changed))
    assert read_policy(tmp_path / "policy.toml") == changed


def test_the_guide_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "federation.md").read_text(encoding="utf8")
    page = page.split("## A site sets its own limits")[1].split("\n## ")[0]
    for name, field in settings_of(Policy).items():
        (row,) = [
            line for line in page.splitlines() if line.startswith("| ") and f"`{name}`" in line.split("|")[1]
        ]
        if isinstance(field.default, bool | int):
            assert row.split("|")[2].strip() == str(field.default).lower(), name


@pytest.mark.parametrize("limit", LIMITS)
def test_every_limit_has_a_line_whatever_a_site_says_of_it(limit: str) -> None:
    plan = make_plan("homlora", SITES[:2])
    for allows in (None, 3, 10**15, -1.5):
        assert len(refusal(plan, limit, allows).splitlines()) == 1


@pytest.mark.parametrize(
    "fields", [{"limit": "w1 w2"}, {"limit": 3}, {"allows": "w1"}, {"limit": ["min_rows"]}]
)
def test_a_problem_has_no_room_for_anything_else(fields: dict[str, Any]) -> None:
    problem = messages.encode({"kind": "problem", "round": 1, "code": "policy"} | fields)
    with pytest.raises(Malformed, match="not as declared"):
        AllowList(None, (), Wire()).check(problem, ("problem",))


# --- numbers that leave ------------------------------------------------------------------------------------


def test_scores_of_few_rows_and_other_metrics_stay_at_home(tmp_path: Path) -> None:
    """20 test rows, 12 validation rows and up: one site shows accuracy alone, one no score, one no validation loss."""
    plan = make_plan("pf2lora", SITES[:3], config={"evaluate_every": 1, "rounds": 2, "batch_size": 20})
    limits = {"site-1": 'metrics = ["accuracy"]', "site-2": "min_rows = 21", "site-3": "min_rows = 15"}
    small = make_small(tmp_path, plan, limits)
    small.run()
    seen: dict[str, list[dict[str, Any]]] = {site: [] for site in SITES[:3]}
    for site, data in small.messages:
        seen[site].append(messages.decode(data).fields)
    for site, fields in seen.items():
        assert fields[0]["test_rows"] == (0 if site == "site-2" else 20)
        scores = [f[key] for f in fields for key in ("served", "before", "deploy") if key in f]
        assert len(scores) == 5
        names = {"site-1": {"rows", "accuracy"}, "site-2": {"rows"}}.get(site)
        assert all(found["rows"] == fields[0]["test_rows"] for found in scores)
        assert all(set(found) == names if names else {"accuracy", "loss"} < set(found) for found in scores)
        assert any("validation" in f for f in fields) == (site == "site-1")


# --- the order of batches ----------------------------------------------------------------------------------


def test_no_one_but_the_site_can_compute_its_batches(tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:2], config={"group_by_length": False})
    small = make_small(tmp_path, plan)
    file = small.files[SITES[0]]
    public = small.setups[SITES[0]].trial.source
    file.with_name("policy.toml").unlink()  # the defaults
    first, again = (build(plan, file, SITES[0]).trial.source for _ in range(2))
    rows = public.data.sizes()[0]
    known = [batch_rows(0, SITES[0], rows, n, 4) for n in range(5)]
    assert all(np.array_equal(public.learner_rows(0, n), known[n]) for n in range(5))
    assert not any(np.array_equal(first.learner_rows(0, n), known[n]) for n in range(5))
    assert all(np.array_equal(first.learner_rows(0, n), again.learner_rows(0, n)) for n in range(5))
    assert first.dropout_key(0, 3) != public.dropout_key(0, 3)
    secret = tmp_path / "state" / SITES[0] / FILE
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.unlink()
    assert not np.array_equal(
        build(plan, file, SITES[0]).trial.source.learner_rows(0, 0), first.learner_rows(0, 0)
    )


def test_a_secret_is_drawn_once_and_checked(tmp_path: Path) -> None:
    found = read_secret(tmp_path / "state")
    assert read_secret(tmp_path / "state") == found and len(found) == 64
    assert [p.name for p in (tmp_path / "state").iterdir()] == [FILE]
    seeds = [(0, "a"), (1, "a"), (0, "b")]
    assert len({private_seed(seed, run, tmp_path / "state") for seed, run in seeds}) == 3
    (tmp_path / "state" / FILE).write_text("0")
    with pytest.raises(StateFolderError, match="damaged"):
        read_secret(tmp_path / "state")


def test_with_known_secrets_a_run_is_the_same_bit_by_bit_and_resumes(tmp_path: Path) -> None:
    """What a secret order must not cost: the same secrets give the same x, through a restart of everybody."""
    plan = make_plan("pf2lora", SITES[:2])
    commons = []
    for name, restarts in (("first", False), ("second", True)):
        for site in plan.sites:
            secret = tmp_path / name / "state" / site / FILE
            secret.parent.mkdir(parents=True)
            secret.write_text(site[-1] * 64)
        small = make_small(tmp_path / name, plan, dict.fromkeys(plan.sites, ""))
        small.greet()
        while not small.coordinator.over:
            small.round()
            if restarts:
                for session in small.sessions.values():
                    session.folder.close()
                small = Small(plan, tmp_path / name, small.files)
        assert small.coordinator.common is not None
        commons.append(small.coordinator.common)
    assert torch.equal(*commons)
    _, local, _ = local_run(tmp_path / "first", plan)
    assert (commons[0] - local).abs().max() > 1e-4  # with other batches


# --- approval ----------------------------------------------------------------------------------------------


def test_an_approved_run_begins(site: Path, tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:2])
    refused(site, "approve = true", plan, tmp_path)
    approvals.approve(site.parent, plan.name, approvals.digest(json.loads(plan.to_json())))
    assert build(plan, site, SITES[0]).facts["model"]
