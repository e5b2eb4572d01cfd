"""A rehearsal's run folder, from what the server recorded and what each site kept."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pf2lora.atomic import write_json
from pf2lora.core.method import take
from pf2lora.federation.protocol import private
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.site_models import CHOICE, SCORES, choice_file, scores_file
from pf2lora.parsing import read_json
from pf2lora.run import costs
from pf2lora.run import folder as run_folder
from pf2lora.run.cards import write_cards
from pf2lora.run.comparison import describe
from pf2lora.run.decode import decode
from pf2lora.run.deploy import SERVED
from pf2lora.run.evaluation import summary
from pf2lora.run.result import Choice, MethodResult, Numbers, Result, RoundRecord, SeedRun, SentBytes
from pf2lora.run.set_up import Trial, set_up, values_of
from pf2lora.run.workload import Workload
from pf2lora.tasks.settings import Metric

LOSS = {"loss": Metric("validation loss", higher_is_better=False, percent=False)}


def collect(
    plan: Plan,
    workload: Workload,
    server: Path,
    out: Path,
    sites: Sequence[Path],
    traits: Sequence[str] = (),
) -> Result:
    """Write result, report and adapters into `out`; `sites` are the sites' state folders, none if they are elsewhere:
    `traits` are then what is known of their rows. The clients have their own names in them, whatever they are called
    as sites."""
    from pf2lora import report

    config, task = workload.config, workload.task
    session = ServerSession(plan, server)
    final = read_json(server / "final.json")
    if (
        session.privacy is not None and sites
    ):  # no score left one; in a rehearsal its folder may be looked into
        files = [scores_file(folder / plan.name, name) for folder, name in zip(sites, workload.names)]
        final = {site: read_json(f) for site, f in zip(plan.sites, files) if f.is_file()}
    trial = set_up(workload, plan.method, config.training.seed)
    record = seed_run(plan, trial, session, final, [folder / plan.name for folder in sites])
    for k, folder in enumerate(sites):
        keep_adapters(folder / plan.name, out, workload.names[k])
    answer, of_round = session.chosen_common(final)
    if answer is not None:
        start, number = trial.state.x[:1].cpu(), of_round or session.done
        if session.privacy is not None:
            answer = private.absolute(trial.method, take(trial.state, [0]), answer, number)
        (whole,) = trial.method.common(start, answer.unsqueeze(0), number)
        run_folder.save_common(out, trial.model, whole, task.peft_type, config.model.name)
    known = run_folder.description(workload, plan.method, config.training.seed)
    # Clients' adapters that are elsewhere are none that a reader of this folder could use.
    kept = known if sites else replace(known, clients=[], traits=list(traits))
    run_folder.save_description(out, kept)
    result = describe(workload, {trial.method.name: MethodResult(trial.method.label, [record])}, [])
    if not sites:  # then what is known of their rows is what they told
        told = [session.sites.get(site, {}) for site in plan.sites]
        rows = [{"train": t.get("train_rows", 0), "test": t.get("test_rows", 0)} for t in told]
        result = replace(result, clients=[replace(c, **n) for c, n in zip(result.clients, rows)])
    write_json(out / "result.json", result.to_dict())
    write_cards(out, config, result)
    report.build([result], out / "report.html")
    trial.model.remove()
    return result


def seed_run(
    plan: Plan, trial: Trial, session: ServerSession, final: dict[str, Any], states: Sequence[Path]
) -> SeedRun:
    """The federated run as one seed of its method. What only sites know (their memory, their ranks) is left out, but
    for what they deploy: in a rehearsal that may leave their folders (`states`)."""
    workload = trial.workload
    rounds = round_records(plan, workload, session, final)
    metrics, last = workload.task.metrics, rounds[-1]
    unknown: dict[str, Numbers] = {metric: [None] * len(plan.sites) for metric in metrics}
    served, before = summary(metrics, last.served or unknown), summary(metrics, last.before_averaging)
    chosen = any("deploy" in answer for answer in final.values())
    # A site without validation rows has nothing to choose by and deploys what it is served.
    deployed = {site: {"deploy": answer.get("served")} | answer for site, answer in final.items()}
    known = {"served": served, "before_averaging": before}
    return SeedRun(
        seed=trial.seeds[0],
        served=served or {},
        before_averaging=before,
        deploy=summary(metrics, scores_at(plan, deployed, "deploy", metrics)) if chosen else None,
        choices=[read_choice(s, c, session.done) for s, c in zip(states, workload.names)]
        if chosen and states
        else None,
        candidates={name: over for name, over in known.items() if over is not None} if chosen else {},
        rounds=rounds,
        layers=trial.model.layer_names,
        parameters=costs.parameters(trial.method, trial.model.personal_layout, trial.state),
        bytes_per_round=sent_bytes(plan, session),
        flops_per_round=None,
        seconds=sum(r.seconds for r in rounds),
        evaluation_seconds=None,
        peak_memory_bytes=None,
        warnings=left_out(session, dict(zip(plan.sites, workload.names))),
        common_round=session.chosen_common(final)[1],
        privacy=session.spent(),
        settings=values_of(trial.method),
    )


def round_records(
    plan: Plan, workload: Workload, session: ServerSession, final: dict[str, Any]
) -> list[RoundRecord]:
    """The server's records as result.json has them. What round r served is measured when round r + 1 begins."""
    metrics, records = workload.task.metrics, list(session.records)
    names = dict(zip(plan.sites, workload.names))
    later = [*(r["scores"] for r in records[1:]), final]
    last = len(records)  # what was before its average is measured once more at the end, with written text
    before = {record["round"]: record["scores"] for record in records}
    before[last] = {s: fields | final.get(s, {}) for s, fields in before[last].items()}

    def means(answers: dict[str, Any], key: str) -> Numbers | None:
        found = [answers.get(site, {}) for site in plan.sites]
        values = [f[key] / f["steps"] if key in f else None for f in found]
        return values if any(v is not None for v in values) else None

    return [
        RoundRecord(
            round=record["round"],
            seconds=record["seconds"],
            train_loss=means(record["scores"], "loss") or [None] * len(plan.sites),
            validation_loss=(scores_at(plan, after, "validation", LOSS) or {}).get("loss"),
            served=scores_at(plan, after, "served", metrics),
            before_averaging=scores_at(plan, before[record["round"]], "before", metrics),
            second_order_share=means(record["scores"], "second_order"),
            left_out={names[site]: why for site, why in record["refused"].items()},
        )
        for record, after in zip(records, later)
    ]


def scores_at(
    plan: Plan, answers: Mapping[str, Any], point: str, metrics: Mapping[str, Metric]
) -> dict[str, Numbers] | None:
    """The sites' scores at a point, from their sums; None where nobody was measured."""
    found = [answers.get(site, {}).get(point) for site in plan.sites]
    if not any(found):
        return None
    return {name: [score(sums or {}, name, metric) for sums in found] for name, metric in metrics.items()}


def score(sums: Mapping[str, float], name: str, metric: Metric) -> float | None:
    """A score from a site's sums. None where it told none, or one that cannot be: a share beyond all of its rows."""
    if not sums.get("rows") or name not in sums:
        return None
    value = sums[name] / sums["rows"]
    return None if metric.percent and abs(value) > 1 + 1e-6 else value


def read_choice(state: Path, client: str, last: int) -> Choice:
    """What a site chose to deploy; what it is served after the `last` round, where it had nothing to choose by."""
    file = choice_file(state, client)
    return decode(Choice, read_json(file), str(file)) if file.is_file() else Choice(SERVED, last, None, {})


def sent_bytes(plan: Plan, session: ServerSession) -> SentBytes:
    """What a site sends up in a round, the mean over rounds and sites, from the ranks of their last updates."""
    if session.common is None:
        return SentBytes(0, 0)
    method, wire = session.known_method, session.wire
    head, adapter = 0.0, 0.0
    for number in range(1, session.done + 1):
        changes = wire.changes(method, number)
        for e in method.leaves(number).entries:
            ranks = [session.ranks.get(site) for site in plan.sites]
            each = [wire.size(e.truncated_size(rank), change=e.name in changes) for rank in ranks]
            mean = sum(each) / len(each) / session.done
            head, adapter = (head + mean, adapter) if e.kind == "head" else (head, adapter + mean)
    return SentBytes(adapter, head)


def left_out(session: ServerSession, clients: Mapping[str, str]) -> list[str]:
    """Rounds that somebody missed; `clients` are the sites' own names."""
    found = []
    for record in session.records:
        found += [
            f"round {record['round']}: {clients[site]} did not answer in time" for site in record["missing"]
        ]
        found += [
            f"round {record['round']}: {clients[site]} was left out: {why}"
            for site, why in record["refused"].items()
        ]
    return found


def keep_adapters(state: Path, out: Path, client: str) -> None:
    """Copy a client's adapters from its site's state folder; in a rehearsal they may leave it."""
    if (state / "clients" / client).is_dir():
        chosen = shutil.ignore_patterns(CHOICE, SCORES)  # the result says it
        shutil.copytree(
            state / "clients" / client, out / "clients" / client, dirs_exist_ok=True, ignore=chosen
        )
        target = out / "state" / "clients"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(state / "state" / "clients" / f"{client}.safetensors", target)
