"""The benchmark of regret: its arithmetic by hand, and runs that can be stopped and merged."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from little_world import command_line
from regret_world import made_up, make_benchmark, together

from pf2lora.engines.bad_clients import Diverged
from pf2lora.errors import UserError
from pf2lora.reproduce.regret import records, runs
from pf2lora.reproduce.regret.records import Try
from pf2lora.reproduce.regret.runs import Plan, expected_seconds
from pf2lora.reproduce.regret.show import draw, markdown
from pf2lora.reproduce.regret.summary import summarize
from pf2lora.reproduce.regret.tasks import COMMON, TASKS
from pf2lora.reproduce.regret.variants import variants

# --- the arithmetic ----------------------------------------------------------------------------------------


def example() -> records.Runs:
    """Two tasks: HOMLoRA is best where clients agree, Local where they do not; a loss is better when smaller."""
    return together(
        made_up("sst2-flipped", "homlora", [0.5, 0.6], [0.5, 0.5]),
        made_up("sst2-flipped", "local", [0.9, 0.8], [0.9, 0.9]),
        made_up("sst2-flipped", "pf2lora", [0.9, 0.7], [0.9, 0.8]),
        made_up("e2e", "homlora", [1.0, 1.2], [1.1, 1.3], metric="loss"),
        made_up("e2e", "local", [1.5, 1.5], [1.5, 1.5], metric="loss"),
        made_up("e2e", "pf2lora", [1.1, 1.2], [1.1, 1.4], metric="loss"),
    )


def test_regret_by_hand() -> None:
    found = summarize(example())["deploy"]
    assert found.best == {"sst2-flipped": "local", "e2e": "homlora"}
    flipped, e2e = found.cells["sst2-flipped"], found.cells["e2e"]
    assert flipped["local"].score.mean == pytest.approx(87.5)
    # Seed by seed: 85 − 55 and 90 − 50.
    assert flipped["homlora"].distance.mean == pytest.approx(35)
    assert flipped["homlora"].distance.deviation == pytest.approx(10 / 2**0.5)
    assert flipped["local"].distance.mean == flipped["local"].distance.deviation == 0
    assert e2e["pf2lora"].distance.mean == pytest.approx(100 * (1.2 - 1.15))
    assert e2e["local"].distance.mean == pytest.approx(35)
    largest = {name: (regret.largest.mean, regret.task) for name, regret in found.regret.items()}
    assert largest["pf2lora"] == (pytest.approx(5), "sst2-flipped")
    assert largest["local"] == (pytest.approx(35), "e2e")
    assert found.regret["pf2lora"].mean == pytest.approx(5)
    assert found.regret["homlora"].mean == pytest.approx(17.5)


def test_the_client_that_sharing_harms_most() -> None:
    found = summarize(example())["deploy"]
    flipped = found.harm["sst2-flipped"]
    assert (flipped["homlora"].client, flipped["homlora"].points) == ("client-1", pytest.approx(40))
    assert (flipped["pf2lora"].client, flipped["pf2lora"].points) == ("client-2", pytest.approx(10))
    assert flipped["local"].points == 0
    assert found.harm["e2e"]["pf2lora"].points < 0  # everybody gains


def test_fine_tuning_alone_is_a_candidate_of_the_same_run() -> None:
    run = made_up("vader", "homlora", [0.5], [0.5])
    better = made_up("vader", "homlora", [0.7], [0.7]).scores
    scores = [
        records.SeedScores(s.seed, s.points, {"personal_steps": b.points["served"]})
        for s, b in zip(run.scores, better)
    ]
    found = summarize(together(made_up("vader", "homlora", [0.5], [0.5], scores=scores)))["served"]
    assert found.best["vader"] == "homlora-alone"
    assert found.cells["vader"]["homlora"].distance.mean == pytest.approx(20)


def test_without_a_head_what_is_about_the_head_is_homlora() -> None:
    found = summarize(together(made_up("e2e", "homlora", [1.0], metric="loss")))["served"]
    assert set(found.cells["e2e"]) == {"homlora", "homlora-head", "homlora-bias"}


def test_a_diverged_run_does_not_drop_out_silently(tmp_path: Path) -> None:
    made = example() | together(made_up("e2e", "hetlora", [1.0], scores=[], diverged="nan", seeds=[0, 1]))
    made |= together(made_up("sst2-flipped", "hetlora", [0.9, 0.9], [0.9, 0.9]))
    found = summarize(made)
    assert found["served"].diverged == [("e2e", "hetlora")]
    assert "hetlora" not in found["served"].cells["e2e"]
    lines = markdown(found, made).splitlines()
    (row,) = {line for line in lines if line.startswith("| HETLoRA") and "diverged" in line}
    assert row.split("|")[-3].strip() == "diverged"  # its regret
    assert [file.suffix for file in draw(found, tmp_path)] == [".svg", ".png"]


def test_the_table_marks_a_regret_over_fewer_tasks() -> None:
    made = example()
    del made["e2e", "local"]
    text = markdown(summarize(made), made)
    assert "(1 of 2 tasks)" in text
    assert "| PF2LoRA | 7.5 ± 3.5" not in text and "**best**" in text
    assert "base model tiny" in text and "0.01 nats" in text


def test_the_rest_of_the_time_is_judged_by_the_runs_so_far() -> None:
    made = together(
        made_up("vader", "local", [0.5], seconds=7.0), made_up("e2e", "local", [0.5], seconds=90.0)
    )
    assert expected_seconds(made, "vader") == 7 and expected_seconds(made, "squad") == 90
    assert expected_seconds({}, "vader") == 0


# --- files -------------------------------------------------------------------------------------------------


def test_parts_are_merged_and_conflicts_refused(tmp_path: Path) -> None:
    one, two = made_up("vader", "local", [0.5]), made_up("vader", "homlora", [0.6])
    a = records.write([one], tmp_path / "a")
    b = records.write([one, two], tmp_path / "b")
    assert records.read([a, b]) == together(one, two)  # the same line twice is one run
    c = records.write([made_up("vader", "local", [0.7])], tmp_path / "c")
    with pytest.raises(UserError, match="two different runs of 'local' on 'vader'"):
        records.read([a, c])
    d = records.write([made_up("vader", "hetlora", [0.5], [0.5])], tmp_path / "d")
    with pytest.raises(UserError, match=r"'local' was run with seeds \[0\], 'hetlora' with \[0, 1\]"):
        records.read([a, d])
    wider = [Try({"lr": 1e-3}, 0.5), Try({"lr": 3e-3}, 0.4), Try({"lr": 0.01}, 0.3, True)]
    e = records.write([made_up("vader", "local", [0.5], outward=2, tries=wider)], tmp_path / "e")
    f = records.write([made_up("vader", "homlora", [0.5], tries=wider[:2])], tmp_path / "f")
    untuned = made_up("vader", "pf2lora-default", [0.5], tries=[])
    g = records.write([untuned], tmp_path / "g")
    for files in ([g, e, f], [f, g, e]):  # who tried two, then more outward, and who is never tuned
        assert len(records.read(files)) == 3
    with pytest.raises(UserError, match="'local' was run with tries 2, 'homlora' with 1"):
        records.read([g, e, records.write([two], tmp_path / "h")])
    d.write_text("{broken\n", encoding="utf8")
    with pytest.raises(UserError, match="line 1: broken JSON"):
        records.read([d])


def test_rows_of_before_tries_went_outward_are_read(tmp_path: Path) -> None:
    """A stored row has neither: it is written as it was then."""
    row = asdict(made_up("vader", "local", [0.5]))
    del row["outward"], row["tries"][0]["outward"]
    file = tmp_path / "old.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf8")
    assert records.read([file]) == together(made_up("vader", "local", [0.5]))


# --- the whole ---------------------------------------------------------------------------------------------


def test_a_small_benchmark_is_run_stopped_resumed_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, one_thread: None
) -> None:
    root = make_benchmark(tmp_path)
    for name, value in {"steps": 1, "batch_size": 4}.items():
        monkeypatch.setitem(COMMON, name, value)

    def command(*args: object) -> tuple[int, str, str]:
        return command_line(monkeypatch, capsys, "reproduce", "regret", *args)

    out = tmp_path / "out"
    same = ["--model", root / "model", "--data-dir", root / "data", "--device", "cpu", "--out", out]
    same += [
        "--rounds",
        2,
        "--seeds",
        2,
        "--tries",
        2,
        "--outward",
        0,
        "--tasks",
        "sst2-h0.9",
        "sst2-flipped",
    ]

    execute, begun = runs.execute, []

    def interrupted(plan: Any, task: Any, variant: Any, workload: Any) -> Any:
        begun.append(f"{task.name} {variant.name}")
        if len(begun) == 2:
            raise KeyboardInterrupt
        return execute(plan, task, variant, workload)

    monkeypatch.setattr(runs, "execute", interrupted)
    everything = [*same, "--variants", "pf2lora", "pf2lora-default", "local"]
    code, printed, _ = command(*everything)
    assert code == 130 and "the same command goes on" in printed
    assert len((out / "regret.jsonl").read_text().splitlines()) == 1

    code, printed, error = command(*everything)
    assert code == 0, error
    assert printed.count("done before") == 1 and len(begun) == 2 + 5
    lines = [json.loads(line) for line in (out / "regret.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    for line in lines:
        assert line["seeds"] == [0, 1] == [score["seed"] for score in line["scores"]]
        if line["variant"] == "pf2lora-default":
            assert line["tries"] == [] and line["rates"] == {"lr": 3e-3}
        else:
            assert len(line["tries"]) == 2 and line["rates"] in [t["rates"] for t in line["tries"]]
            assert all(t["loss"] is not None for t in line["tries"])
        assert (
            len(line["scores"][0]["points"]["served"]["accuracy"]["per_client"]) == len(line["clients"]) == 8
        )
        assert line["settings"]["training"]["rounds"] == 2 and line["versions"]["torch"]
    table = (out / "regret.md").read_text(encoding="utf8")
    assert "SST-2, flipped labels" in table and "| Local |" in table and table in printed
    assert (out / "regret.svg").stat().st_size > 1000 and (out / "regret.png").is_file()

    for other in (("--rounds", 3), ("--outward", 1)):
        code, _, error = command(*everything, *other)
        assert code == 2 and "was run with other settings" in error
    merged = tmp_path / "merged"
    code, printed, _ = command("--read", out / "regret.jsonl", out / "regret.jsonl", "--out", merged)
    assert code == 0 and (merged / "regret.md").read_text(encoding="utf8") == table


def test_a_variant_that_cannot_be_run_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    root = make_benchmark(tmp_path)
    over = {"device": "cpu", "rounds": 1, "steps": 1}
    plan = Plan(str(root / "model"), "", root / "data", tmp_path / "work", seeds=1, tries=1, over=over)
    train = runs.train

    def broken(workload: Any, config: Any) -> Any:
        if config.training.method == ("homlora",):
            raise Diverged("not a number")
        if config.training.method == ("hetlora",):
            raise UserError("cannot be")
        return train(workload, config)

    monkeypatch.setattr(runs, "train", broken)
    todo = [(TASKS["sst2-h0.9"], variants()[name]) for name in ("homlora", "hetlora", "local")]
    failures = runs.execute_all(plan, todo, tmp_path, say=lambda line: None)
    assert failures == ["sst2-h0.9, hetlora: cannot be"]
    found = records.read([tmp_path / records.FILE])
    assert {name: run.diverged for (_, name), run in found.items()} == {
        "homlora": "not a number",
        "local": "",
    }
    said: list[str] = []
    runs.execute_all(plan, todo, tmp_path, seconds=0.0, say=said.append)
    assert "not begun" in said[-1]


def test_tasks_and_variants_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, printed, _ = command_line(monkeypatch, capsys, "reproduce", "regret", "--list")
    assert code == 0 and all(name in printed for name in (*TASKS, *variants()))
    code, _, error = command_line(monkeypatch, capsys, "reproduce", "regret")
    assert code == 2 and "--model and --data-dir" in error


def test_the_table_says_where_nobody_is_better_than_guessing() -> None:
    """`vader` is learned, `squad` is not, nor is SST-2, as far as its seeds tell; and nothing is known of `e2e`, whose
    answer without a text has no score."""
    noisy = together(made_up("sst2-h0.9", "local", [0.9], [0.96], trivial=0.91))
    assert not summarize(noisy)["served"].learned("sst2-h0.9")
    made = together(
        made_up("vader", "local", [0.7], [0.7], trivial=0.6),
        made_up("squad", "local", [0.5], [0.5], metric="f1", trivial=0.52),
        made_up("e2e", "local", [1.0], [1.0], metric="loss"),
    )
    found = summarize(made)["served"]
    assert [found.learned(task) for task in ("vader", "squad", "e2e")] == [True, False, True]
    text = markdown(summarize(made), made)
    row = next(line for line in text.splitlines() if line.startswith("| without looking"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [
        *("–", "–", "–", "–", "–", "60.0", "–", "–", "–", "52.0 (!)", "–", "–", "", "")
    ]
    assert text.count("(!) SQuAD") == 2  # deployed and served
    assert "(!)" not in markdown(summarize(example()), example())
