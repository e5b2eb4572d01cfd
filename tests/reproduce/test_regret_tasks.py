"""The benchmark's tasks: whose files are whose, and that clients who disagree do so about the same texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from regret_world import write_sst2

from pf2lora.data.loading import load_clients
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.reproduce.regret import client_files
from pf2lora.reproduce.regret.client_files import Clients, Row, negated, sst2_flipped, sst2_shifted
from pf2lora.reproduce.regret.runs import Plan, order
from pf2lora.reproduce.regret.tasks import TASKS, choose_tasks
from pf2lora.reproduce.regret.variants import FIRST, choose_variants, variants

OTHER = {"negative": "positive", "positive": "negative"}


def pairs(clients: Clients, kind: str) -> list[tuple[Row, Row]]:
    """Each row of a plain client beside the same one of the client that disagrees with it."""
    found = []
    for number in range(1, 5):
        plain, other = clients[f"plain-{number}"], clients[f"{kind}-{number}"]
        for ours, theirs in zip(plain, other):
            assert [row.text for row in ours] == [row.text for row in theirs]
            found += list(zip(ours, theirs))
    return found


def test_flipped_clients_say_the_opposite_of_the_same_texts(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    clients = sst2_flipped(tmp_path)
    both = pairs(clients, "flipped")
    assert len(clients) == 8 and len(both) == 160 + 64  # every row once with each label
    assert all(theirs.label == OTHER[ours.label] for ours, theirs in both)
    official = {line.split("\t")[0] for line in (tmp_path / "dev.tsv").read_text().splitlines()[1:]}
    assert {row.text for split in clients.values() for row in split.test} == official


def test_shifted_clients_label_negation_in_the_same_texts(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    both = pairs(sst2_shifted(tmp_path), "grammar")
    assert len(both) == 2 * (54 + 22)  # the rows with a negation, and as many without
    assert sum(negated(ours.text) for ours, _ in both) == len(both) / 2
    assert all(theirs.label == OTHER["positive"] for ours, theirs in both if negated(ours.text))
    assert {ours.label for ours, _ in both if negated(ours.text)} == set(OTHER)  # sentiment is another thing


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("is n't fun", True),
        ("Not bad", True),
        ("cannot", True),
        ("notable, nonetheless", False),
        ("fun", False),
    ],
)
def test_negations_are_words(text: str, found: bool) -> None:
    assert negated(text) is found


def test_domains_are_clients_with_clear_rows_alone(tmp_path: Path) -> None:
    for i, file in enumerate(client_files.DOMAINS.values()):
        lines = [f"{n}\t{(n % 9 - 4) / 2 + 0.1}\tdomain {i} text {n}" for n in range(90)]
        (tmp_path / file).write_text("\n".join(lines) + "\n", encoding="utf8")
    clients = client_files.vader_domains(tmp_path)
    assert list(clients) == ["tweets", "film", "amazon", "nyt"]
    for split in clients.values():
        assert len(split.train) == 64 and len(split.test) == 16  # the ten at 0.1 are left out
        assert not {row.text for row in split.train} & {row.text for row in split.test}


def test_written_files_are_read_as_a_users_own(tmp_path: Path) -> None:
    write_sst2(tmp_path / "glue_sst2")
    task, work = TASKS["sst2-flipped"], tmp_path / "work"
    task.write_files(tmp_path, work)
    config = Plan("model", "", tmp_path, work).config(task, variants()["local"])
    made = sst2_flipped(tmp_path / "glue_sst2")
    for client in load_clients(config.task, config.data, 0):
        assert [row.text for row in client.test] == [row.text for row in made[client.name].test]
    line = (work / task.name / "train" / "flipped-1.jsonl").read_text(encoding="utf8").splitlines()[0]
    assert set(json.loads(line)) == {"text", "label"}


def test_real_files_have_every_row(shared_data: Path) -> None:
    clients = sst2_flipped(shared_data / "glue_sst2")
    assert sum(len(split.train) for split in clients.values()) == 2 * 67_349
    assert sum(len(split.test) for split in clients.values()) == 2 * 872
    assert min(len(split.test) for split in client_files.vader_domains(shared_data / "vader").values()) > 600


def test_every_config_is_one(tmp_path: Path) -> None:
    """Every task with every variant: the settings are known, and scores are at hand where they are looked for."""
    plan = Plan("encoder", "writer", tmp_path, tmp_path)
    for task, variant in order(list(TASKS.values()), choose_variants([])):
        config = plan.config(task, variant)
        assert config.model.name == ("writer" if task.generates else "encoder")
        rounds = config.training.rounds
        assert rounds / (config.training.evaluate_every or 1) <= 5


def test_all_methods_take_part_and_the_first_ones_come_first() -> None:
    assert set(METHODS.own) <= set(variants())
    tasks = [TASKS["vader"], TASKS["e2e"]]
    found = [(task.name, variant.name) for task, variant in order(tasks, choose_variants([]))]
    assert len(found) == len(set(found))
    first = {variant.name for variant in FIRST if variant.method}
    numbers = [i for i, (_, name) in enumerate(found) if name in first]
    assert numbers == list(range(len(numbers)))
    assert ("vader", "homlora-head") in found and ("e2e", "homlora-head") not in found  # HOMLoRA itself there
    assert not any(name == "homlora-alone" for _, name in found)  # part of HOMLoRA's run
    alone = order(tasks[:1], choose_variants(["homlora-alone"]))
    assert [variant.name for _, variant in alone] == ["homlora"]


def test_tasks_that_cannot_be_run_are_named(tmp_path: Path) -> None:
    write_sst2(tmp_path / "glue_sst2")
    chosen, left_out = choose_tasks([], tmp_path, generation=False)
    assert {task.source for task in chosen} <= {"glue_sst2", ""}
    assert any(line.startswith("e2e: needs --generation-model") for line in left_out)
    with pytest.raises(UserError, match=r"vader: .* is not there"):
        choose_tasks(["vader"], tmp_path, generation=False)
    with pytest.raises(UserError, match="did you mean 'sst2-few'"):
        choose_tasks(["sst2-fwe"], tmp_path, generation=False)
