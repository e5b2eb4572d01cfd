"""Every task in a federation: the local engine's numbers to the last bit, columns, agreements and scores of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import in_time, settings, write_policy
from task_federation import LENGTHS, NAMES, TASKS, make_world
from tiny_tasks import write_rows

from pf2lora.errors import UnknownLabel, UserError
from pf2lora.federation.flare.rehearse import write_site
from pf2lora.federation.protocol import messages, outcome
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE
from pf2lora.federation.protocol.problems import PROBLEMS, problem_code
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.site_setup import (
    build,
    load_client,
    read_site_file,
    site_config,
    state_folder,
)
from pf2lora.methods import METHODS
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.set_up import set_up
from pf2lora.run.trial import run

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread", "no_java")

FEDERATED = [name for name, kind in METHODS.items() if kind.federated]


@pytest.mark.parametrize("method", [pytest.param(m, marks=in_time(m)) for m in FEDERATED])
@pytest.mark.parametrize(
    "task", [pytest.param(TASKS[0], marks=pytest.mark.slow), *TASKS[1:]]
)  # classification, nearly: test_federation_core
def test_every_method_is_the_local_engine_to_the_last_bit(tmp_path: Path, task: str, method: str) -> None:
    """Where that trains one client at a time: with several in one pass it rounds otherwise."""
    world = make_world(tmp_path, task, method)
    world.small.greet()
    while not world.small.coordinator.over:
        world.small.round()
    found = world.small.coordinator.common
    assert found is not None and found.norm() > 0.01
    assert torch.equal(found, world.local_common())
    own = world.small.setups[NAMES[0]].metrics  # the server knows them without a model
    assert world.plan.run.task.metric_names(world.plan.labels, world.plan.metric) == own


def test_packed_conversations_are_the_local_engine_to_the_last_bit(tmp_path: Path) -> None:
    """Each site writes them down in its own way; a site of conversations in a run of prompts says what is wrong."""
    world = make_world(tmp_path / "chat", "generation", chat=True, packing=True)
    world.small.greet()
    while not world.small.coordinator.over:
        world.small.round()
    found = world.small.coordinator.common
    assert found is not None and found.norm() > 0.01
    assert torch.equal(found, world.local_common())
    own = world.small.setups[NAMES[0]].metrics
    assert world.plan.run.task.metric_names(world.plan.labels, world.plan.metric) == own
    plain = Plan.of(world.plan.run, "plain", NAMES, ())
    config, _ = site_config(plain, world.small.files[NAMES[0]])
    with pytest.raises(UnknownLabel, match="has conversations, but the run knows only prompts"):
        load_client(config, plain, NAMES[0])


@pytest.mark.parametrize("task", TASKS[1:])
def test_sizes_scores_and_choices_are_the_local_runs(tmp_path: Path, task: str) -> None:
    world = make_world(tmp_path, task, rounds=3, client_lr="auto", evaluate_every=1, lr=0.03)
    world.small.run()
    final = json.loads((tmp_path / "server" / "final.json").read_text())
    config = world.config()
    trial = set_up(prepare(config), world.plan.method, config.training.seed)
    (local,) = run(trial, lambda seed, record: None)
    states = [state_folder(world.plan, file) for file in world.small.files.values()]
    found = outcome.seed_run(world.plan, trial, world.small.coordinator, final, states)
    assert found.choices == local.record.choices
    tables = (
        (found.served, local.record.served),
        (found.before_averaging, local.record.before_averaging),
        (found.deploy, local.record.deploy),
    )
    for ours, theirs in tables:
        assert ours is not None and theirs is not None and ours.keys() == theirs.keys()
        for metric, table in theirs.items():
            both = zip(ours[metric].per_client, table.per_client, strict=True)
            # None: a score that needs Java
            assert all(a == b if b is None else a == pytest.approx(b, rel=1e-12) for a, b in both)


def test_written_text_is_scored_at_the_end_alone(tmp_path: Path) -> None:
    small = make_world(tmp_path, "generation", evaluate_every=1).small
    small.run()
    for _, data in small.messages:
        fields = messages.decode(data).fields
        at_end = fields["kind"] == "scores"
        for point in ("served", "before", "deploy"):
            if point in fields:
                assert ("BLEU" in fields[point]) == at_end
                assert {"rows", "loss", "perplexity"} <= fields[point].keys()
    final = json.loads((tmp_path / "server" / "final.json").read_text())
    assert all({"served", "before"} <= final[site].keys() for site in NAMES)


@pytest.mark.parametrize("task", TASKS[1:])
def test_a_killed_federation_goes_on_to_the_same_bits(tmp_path: Path, task: str) -> None:
    changes: dict[str, Any] = {"rounds": 3, "client_lr": "auto", "evaluate_every": 1}
    straight = make_world(tmp_path / "straight", task, **changes).small
    straight.run()
    broken = make_world(tmp_path / "broken", task, **changes).small
    broken.greet()
    broken.round()
    broken.ask(broken.coordinator.requests(list(NAMES), {1, 2, 3}))  # the answers of round 2 are lost
    for session in broken.sessions.values():
        session.folder.close()
    broken.start_server()
    broken.sessions = {site: broken.start_site(site) for site in broken.files}
    broken.run()
    assert torch.equal(broken.coordinator.common, straight.coordinator.common)  # type: ignore[arg-type]
    ends = [(tmp_path / name / "server" / "final.json").read_text() for name in ("straight", "broken")]
    assert ends[0] == ends[1]


# --- columns ------------------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {
    "question-answering": (
        {"context": "story", "question": "asks", "answers": "found"},
        [{"story": "salt iron river", "asks": "where is the key ?", "found": ["iron"], "answers": "no"}] * 10,
    ),
    "generation": (
        {"prompt": "dish", "target": "menu"},
        [{"dish": f"soup {k}", "menu": ["We serve it."], "prompt": "no", "target": "no"} for k in range(10)],
    ),
}


@pytest.mark.parametrize("task", TASKS[1:])
def test_a_site_names_the_columns_of_the_runs_task(tmp_path: Path, task: str) -> None:
    world = make_world(tmp_path, task)
    columns, rows = COLUMNS[task]
    file = world.small.files["site-1"]
    data = write_rows(tmp_path / "own.jsonl", rows)
    named = "".join(f'{key} = "{column}"\n' for key, column in columns.items())
    file.write_text(f'model = "{world.model}"\nstate = "s"\n[data]\nclients = ["{data}"]\n{named}')
    read_site_file(file)  # as `join` does, before any run
    config, _ = site_config(world.plan, file)
    client, _ = load_client(config, world.plan, "site-1")
    row = client.train[0]
    text = row.context if task == "question-answering" else row.prompt
    assert text.startswith(("salt iron", "soup"))
    file.write_text(file.read_text() + 'label = "x"\n')
    with pytest.raises(UserError, match=r"\[data\] unknown key 'label'"):
        site_config(world.plan, file)


# --- what sites agree on --------------------------------------------------------------------------------------


def question_plan(labels: tuple[str, ...] = ()) -> Plan:
    return Plan.of(from_settings({"task": "question-answering"}), "trial", NAMES, labels)


def test_whether_questions_may_have_no_answer_is_in_the_plan() -> None:
    assert question_plan().labels == ("answer",)
    assert question_plan(("no answer", "answer")).labels == ("answer", "no answer")
    with pytest.raises(UserError, match='--labels "answer,no answer"'):
        question_plan(("yes", "no"))


def test_a_site_with_questions_without_an_answer_says_what_the_lead_should_do(tmp_path: Path) -> None:
    world = make_world(tmp_path, "question-answering")
    with pytest.raises(UnknownLabel, match=r'has no answer.*--labels "answer,no answer"') as caught:
        build(replace(world.plan, labels=("answer",)), world.small.files["site-1"], "site-1")
    assert "questions without an answer" in PROBLEMS[problem_code(caught.value)]


def test_generation_has_no_labels_and_classification_must_have_some() -> None:
    with pytest.raises(UserError, match="generation has no labels"):
        Plan.of(from_settings({"task": "generation"}), "trial", NAMES, ("a", "b"))
    with pytest.raises(UserError, match="--labels is missing"):
        Plan.of(from_settings({}), "trial", NAMES, ())


def test_the_scores_of_the_leads_data_set_are_the_sites(tmp_path: Path) -> None:
    """A site has files alone and cannot know that they are WebNLG's, or CoLA's."""
    plan = Plan.of(from_settings({"task": "generation", "dataset": "webnlg"}), "trial", NAMES, ())
    assert plan.metric == "webnlg" and Plan.from_json(plan.to_json()) == plan
    world = make_world(tmp_path, "generation")
    setup = build(replace(world.plan, metric="webnlg"), world.small.files["site-1"], "site-1")
    assert setup.metrics == ("BLEU", "METEOR", "TER", "ROUGE_L", "loss", "perplexity")
    cola = Plan.of(from_settings({"dataset": "cola"}), "trial", NAMES, ("0", "1"))
    assert cola.metric == "matthews"


# --- a rehearsal's rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_the_rows_that_a_rehearsal_writes_are_read_as_the_same_rows(tmp_path: Path, task: str) -> None:
    world = make_world(tmp_path, task)
    if task == "question-answering":  # the second "iron" is meant: a search for the text would find the first
        row = {"context": "iron salt iron", "question": "where ?", "title": "t", "id": "q1"}
        answers = [{"text": "iron", "answer_start": 10}]
        for file in world.data["clients"]:
            write_rows(Path(file), [row | {"answers": answers}, row | {"answers": []}] * 6)
    workload = prepare(world.config())
    for client in workload.clients:
        folder, kit = tmp_path / "rehearsal" / client.name, tmp_path / "kit" / client.name
        (kit / "local").mkdir(parents=True)
        write_site(client, workload.config, folder, kit)
        config, own = site_config(world.plan, kit / "local" / "site.toml")
        read, _ = load_client(config, world.plan, own.name)
        assert (read.train, read.test, read.validation) == (client.train, client.test, client.validation)
    if task == "question-answering":
        assert {row.starts for row in read.train} == {(10,), ()}


def test_final_scores_have_a_deadline_of_their_own() -> None:
    plan = Plan.of(from_settings({"task": "generation"}), "trial", NAMES, (), deadline=5, final_deadline=700)
    assert (plan.deadline, plan.final_deadline) == (5, 700)
    with pytest.raises(UserError, match="final_deadline is 0"):
        replace(plan, final_deadline=0)


# --- real processes -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS[1:])
def test_a_rehearsal_is_the_run_in_one_process_and_the_local_run(tmp_path: Path, task: str) -> None:
    world = make_world(tmp_path, task, "hetlora", NAMES[:2], rounds=2)
    values = settings(rounds=2, clients_per_pass=1) | LENGTHS[task] | {"task": task, "method": "hetlora"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    files = [*("--clients", *world.data["clients"]), "--model", str(world.model), "--device", "cpu"]
    start = [sys.executable, "-c", "from pf2lora.cli.federation import app; app()", "rehearse"]
    out = tmp_path / "run"
    write_policy(tmp_path)
    done = subprocess.run(
        [*start, *files, *flags, "--policy", str(tmp_path / POLICY_FILE), "--out", str(out)],
        env=os.environ | {"PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plan = Plan.from_json((out / "federation" / "plan.json").read_text())
    common = ServerSession(plan, out / "federation" / "kits" / "server" / "runs" / plan.name).common
    world.small.run()
    assert torch.equal(common, world.small.coordinator.common)  # type: ignore[arg-type]
    assert torch.equal(common, world.local_common())  # type: ignore[arg-type]
    result = json.loads((out / "result.json").read_text())
    served = result["methods"]["hetlora"]["runs"][0]["served"]
    headline = "BLEU" if task == "generation" else "f1"
    assert all(isinstance(score, float) for score in served[headline]["per_client"])
    assert (out / "report.html").is_file()
