"""How the benchmark of regret chooses rates: alike for everybody, on validation rows, outward while the best is at an
end; and not at all for what is never tuned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from regret_world import made_up, make_benchmark, together

from pf2lora.cli.reproduce_dry_run import timed_task
from pf2lora.errors import UserError
from pf2lora.reproduce.regret import records, runs
from pf2lora.reproduce.regret.records import Try
from pf2lora.reproduce.regret.runs import TUNING_SEED, Plan, best, config_of_tries, tune
from pf2lora.reproduce.regret.show import draw, markdown
from pf2lora.reproduce.regret.summary import summarize
from pf2lora.reproduce.regret.tasks import TASKS
from pf2lora.reproduce.regret.variants import (
    FIRST,
    MOST_OUTWARD,
    MOST_TRIES,
    Variant,
    check_tries,
    variants,
)
from pf2lora.run import dry_run
from pf2lora.run.config import Config, from_settings, merged
from pf2lora.run.tries import deployed_loss, on_validation_rows, run_tries
from pf2lora.run.work import work_of_rounds
from pf2lora.run.workload import load_workload


def tuned(variant: Variant, losses: Sequence[float | None], **changes: Any) -> list[Try]:
    """The tries of a variant whose runs, one after the other, have these losses; all of them are asked for."""
    plan = Plan("model", "", Path("data"), Path("work"), **changes)
    config, seen = plan.config(TASKS["vader"], variant), list[dict[str, float]]()

    def given(shorter: Config, rates: Sequence[dict[str, float]]) -> Sequence[float | None]:
        assert (shorter.training.seed, shorter.training.seeds) == (TUNING_SEED, 1)
        assert len(rates) == (1 if seen else plan.tries)  # all that everybody tries at once, then one by one
        seen.extend(rates)
        return losses[len(seen) - len(rates) : len(seen)]

    tries = tune(variant, config, 1e-3, plan, given)
    assert seen == [t.rates for t in tries] and len(seen) == len(losses)
    assert [t.loss for t in tries] == list(losses)
    return tries


def lrs(tries: Sequence[Try]) -> list[float]:
    return [t.rates["lr"] for t in tries]


def test_every_variant_gets_the_same_tries_and_the_lowest_loss_wins() -> None:
    for variant in variants().values():
        if variant.method and variant.tuned:
            tries = tuned(variant, [0.4, 0.5, None])
            assert lrs(tries) == pytest.approx([1e-3, 1e-3 / 3, 3e-3])
            assert best(tries) == tries[0].rates


@pytest.mark.parametrize(
    ("losses", "further", "chosen"),
    [
        ([0.5, 0.6, 0.4, 0.45], [1e-2], 3e-3),  # it was no end
        ([0.5, 0.6, 0.4, 0.3, 0.2], [1e-2, 3e-2], 3e-2),  # still one, but two further tries are all
        ([0.5, 0.6, 0.4, None], [1e-2], 3e-3),
        ([0.5, 0.4, 0.6, 0.3, 0.35], [1e-4, 1e-3 / 30], 1e-4),
        ([None, None, None], [], 1e-3),
    ],
)
def test_tries_go_on_outward_while_the_best_is_at_an_end(
    losses: list[float | None], further: list[float], chosen: float
) -> None:
    tries = tuned(variants()["local"], losses)
    assert lrs(tries)[3:] == pytest.approx(further) and [t.outward for t in tries] == [False] * 3 + [
        True
    ] * len(further)
    assert best(tries)["lr"] == pytest.approx(chosen)
    assert lrs(tuned(variants()["local"], losses[:3], outward=0)) == lrs(tries)[:3]


def test_there_is_a_factor_for_every_try() -> None:
    falling = [1.0 - i / 10 for i in range(MOST_TRIES + MOST_OUTWARD)]
    falling[3] = 2.0  # of the smallest
    tries = tuned(variants()["local"], falling, tries=MOST_TRIES, outward=MOST_OUTWARD)
    assert lrs(tries)[-2:] == pytest.approx([3e-2, 1e-1])
    for wrong in ((0, 0), (MOST_TRIES + 1, 0), (3, -1), (3, MOST_OUTWARD + 1)):
        with pytest.raises(UserError, match="it must lie between"):
            check_tries(*wrong)


def test_what_is_never_tuned_is_what_train_does_with_nothing_set(tmp_path: Path) -> None:
    """No rate, rank or choice of its own, and none of the benchmark's: a task says how long and how much."""
    variant = variants()["pf2lora-default"]
    assert tuned(variant, []) == [] and variant in FIRST
    for task in TASKS.values():
        config = Plan("model", "generator", tmp_path, tmp_path).config(task, variant)
        plain = from_settings({"task": config.task.name})
        assert (config.adapter, config.methods, config.training.method) == (
            plain.adapter,
            plain.methods,
            ("pf2lora",),
        )
        assert config.data.validation_ratio == plain.data.validation_ratio > 0
        length = ("rounds", "steps", "batch_size", "seeds", "evaluate_every")
        of_task = {name: getattr(plain.training, name) for name in length}
        assert replace(config.training, **of_task) == plain.training
        assert config.training.client_lr == "auto"


def test_where_a_choice_lies_at_an_end_the_table_says_so(tmp_path: Path) -> None:
    def run(variant: str, lr: float, tries: Sequence[float] = (1e-3, 3e-4, 3e-3)) -> records.Run:
        tried = [Try({"lr": rate}, 0.5) for rate in tries]
        return made_up("vader", variant, [0.5], tries=tried, rates={"lr": lr})

    made = together(
        *(run("homlora", 3e-3), run("local", 1e-3), run("hetlora", 3e-4)),
        run("pf2lora-default", 1e-3, ()),
    )
    assert [r.end for r in made.values()] == ["↑", "", "↓", ""]
    assert run("local", 1e-3, [1e-3]).end == ""  # one try has no end
    text = markdown(summarize(made), made)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    rows = {row[0]: dict(zip(table[0], row)) for row in table}
    told = {name: row.get("four domains (vader)", "") for name, row in rows.items()}
    assert told["HOMLoRA"].endswith("↑") and told["HETLoRA"].endswith("↓")
    apart = "**PF2LoRA, nothing set (lr 0.001)**"
    assert not told["Local"].endswith(("↑", "↓")) and not told[apart].endswith(("↑", "↓"))
    assert all(rows[apart][task.title] == "–" for task in TASKS.values() if task.name != "vader")
    assert "2 of 3 tuned runs (1 ↑, 1 ↓)" in text and "never tuned" in text
    drawn, _ = draw(summarize(made), tmp_path)
    labels = re.findall(r"<text style=\"([^\"]*)[^>]*>(PF2LoRA|HOMLoRA|Local)", drawn.read_text("utf8"))
    assert {name: "weight: 700" in style for style, name in labels} == {
        **{"PF2LoRA": True, "HOMLoRA": False, "Local": False}
    }
    of_one = together(run("local", 1e-3))
    assert "↑" not in markdown(summarize(of_one), of_one)


def test_rates_are_tuned_on_validation_rows(tmp_path: Path, one_thread: None) -> None:
    """With every label of the test rows turned round the tries and the choice are the same, and the scores are not."""
    made = []
    for name in ("as it is", "spoilt"):
        root = make_benchmark(tmp_path / name)
        dev = root / "data" / "glue_sst2" / "dev.tsv"
        if name == "spoilt":
            lines = dev.read_text(encoding="utf8").translate(str.maketrans("01", "10"))
            dev.write_text(lines, encoding="utf8")
        over = {"device": "cpu", "rounds": 4, "steps": 4, "heterogeneity": 0.0}
        plan = Plan(str(root / "model"), "", root / "data", tmp_path / "work", seeds=1, tries=2, over=over)
        pair = TASKS["sst2-h0.9"], variants()["homlora"]
        made.append(runs.execute(plan, *pair, runs.Current(plan).workload(*pair)))
    plain, spoilt = made
    assert plain.settings["training"]["lr"] == "auto" and lrs(plain.tries)[:2] == pytest.approx([3e-3, 1e-3])
    before = replace(plain, variant="local", settings=merged(plain.settings, {"training": {"lr": 1e-3}}))
    assert (
        len(records.read([records.write([plain, before], tmp_path / "merged")])) == 2
    )  # lr was a number once
    assert plain.tries == spoilt.tries and plain.rates == spoilt.rates
    assert len({t.loss for t in plain.tries}) == len(plain.tries) > 1
    assert plain.scores[0].points["served"]["loss"] != spoilt.scores[0].points["served"]["loss"]


def test_a_try_is_judged_by_what_its_clients_would_deploy(tmp_path: Path, one_thread: None) -> None:
    """As a whole run of it tells, side by side or not; one that diverged has no loss."""
    root = make_benchmark(tmp_path)
    over = {"device": "cpu", "rounds": 2, "steps": 3}
    plan = Plan(str(root / "model"), "", root / "data", tmp_path / "work", seeds=1, over=over)
    task, variant = TASKS["sst2-h0.9"], variants()["homlora-head"]
    workload, config = runs.Current(plan).workload(task, variant), plan.config(task, variant)
    rates = [{"lr": 1e-3}, {"lr": 3e-3}]
    found = runs.losses(workload, variant, config, rates)
    whole = [runs.train(workload, variant.with_rates(config, own))[0].deployed_loss for own in rates]
    assert found == pytest.approx(whole, abs=1e-6) and found[0] != found[1]
    beside = on_validation_rows(replace(workload, config=config))
    assert [t.score for t in run_tries(beside, "homlora", rates, deployed_loss)] == pytest.approx(
        found, abs=1e-5
    )
    assert runs.losses(workload, variant, config, [{"lr": 1e-3}, {"lr": 1e30}]) == [found[0], None]


def test_a_methods_own_rates_are_tuned_beside_lr(tmp_path: Path) -> None:
    config = Plan("model", "", tmp_path, tmp_path).config(TASKS["vader"], variants()["per-fedavg"])
    changed = variants()["per-fedavg"].with_rates(config, {"lr": 0.1, "adaptation_lr": 0.2})
    assert changed.training.lr == 0.1 and changed.methods == {"per-fedavg": {"adaptation_lr": 0.2}}


def test_one_try_is_the_default_without_a_run(tmp_path: Path) -> None:
    config = Plan("model", "", tmp_path, tmp_path).config(TASKS["vader"], variants()["local"])
    plan = Plan("model", "", tmp_path, tmp_path, tries=1)
    found = tune(variants()["local"], config, 0.002, plan, lambda tried, rates: pytest.fail("a run"))
    assert found == [Try({"lr": 0.002}, None)]


def test_a_reported_seed_is_not_tuned_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tuned on seed 1000"):
        Plan("model", "", tmp_path, tmp_path, seed=999).check()


def test_the_dry_run_counts_the_tries_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """A try is a run of half the rounds with one seed, and of as many steps that clients try alone at its end."""
    root = make_benchmark(tmp_path)
    over = {"device": "cpu", "rounds": 4, "steps": 2}
    plan = Plan(str(root / "model"), "", root / "data", tmp_path / "work", seeds=3, tries=3, over=over)
    monkeypatch.setattr(dry_run, "method_plan", lambda *_: SimpleNamespace(step_seconds=1.0))
    task = TASKS["sst2-h0.9"]
    (_, never), (_, tuned) = (
        timed_task(plan, [(task, variants()[name])]) for name in ("pf2lora-default", "pf2lora")
    )
    assert 4 * 2 < never < 20 * 2  # its steps, each a second for three seeds, and what else it has to do
    config = plan.config(task, variants()["pf2lora"])
    workload = load_workload(config)
    of_run = 3 * sum(work_of_rounds(workload, "pf2lora"))
    of_try = sum(work_of_rounds(replace(workload, config=config_of_tries(config)), "pf2lora"))
    assert tuned / never == pytest.approx(1 + (3 + 2) * of_try / of_run)
