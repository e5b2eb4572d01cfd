"""A rehearsal's run folder, from what the server recorded and what each site kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.methods import METHODS
from pf2lora.run import costs, trial
from pf2lora.run import folder as run_folder
from pf2lora.run.folder import Saved
from pf2lora.run.trial import Workload


def collect(plan: Plan, workload: Workload, server: Path, out: Path, sites: Sequence[Path]) -> dict[str, Any]:
    """Write result, report and adapters into `out`; `sites` are the sites' state folders. The clients have their own
    names in them, whatever they are called as sites."""
    from pf2lora import report
    from pf2lora.run.experiment import describe

    name, config = plan.method, workload.config
    session = ServerSession(plan, server)
    set_up = trial.set_up(workload, name, config.seed)
    final = json.loads((server / "final.json").read_text())
    rounds = round_records(plan, workload, session, final)
    layout = set_up.model.x
    record = {
        "seed": config.seed,
        "served": trial.summary(workload, rounds[-1]["served"]),
        "before_averaging": trial.summary(workload, rounds[-1]["before_averaging"]),
        "rounds": rounds,
        "layers": set_up.model.layer_names,
        "parameters": costs.parameters(layout, set_up.model.y),
        "bytes_per_round": sent_bytes(plan, session),
        "flops_per_round": None,
        "seconds": sum(r["seconds"] for r in rounds),
        "peak_memory_bytes": None,
        "warnings": left_out(session, dict(zip(plan.sites, workload.names))),
    }
    for k, folder in enumerate(sites):
        keep_adapters(folder / plan.name, out, workload.names[k])
    if session.common is not None:
        whole = torch.cat([session.common, set_up.state.x[0].cpu()[layout.shared :]])
        run_folder.save_common(out, set_up.model, whole, config.task, config.model)
    run_folder.save_description(
        out, Saved(name, config.seed, config.task, list(plan.labels), list(workload.names))
    )
    result = describe(workload) | {
        "methods": {name: {"label": METHODS[name].label, "runs": [record]}},
        "examples": [],
    }
    run_folder.write_json(out / "result.json", result)
    report.build([result], out / "report.html")
    set_up.model.remove()
    return result


def round_records(
    plan: Plan, workload: Workload, session: ServerSession, final: dict[str, Any]
) -> list[dict[str, Any]]:
    """The server's records as result.json has them. What round r served is measured when round r + 1 begins."""
    measured, metrics = trial.evaluation_rounds(workload.config), list(workload.task.metrics)
    later = [*(r["scores"] for r in session.records[1:]), final]

    def scores(answers: dict[str, Any], point: str) -> dict[str, list[float | None]] | None:
        found = [answers.get(site, {}).get(point) for site in plan.sites]
        if not any(found):
            return None
        return {m: [f[m] / f["rows"] if f and m in f and f["rows"] else None for f in found] for m in metrics}

    def means(answers: dict[str, Any], key: str) -> list[float | None] | None:
        found = [answers.get(site, {}) for site in plan.sites]
        values = [f[key] / f["steps"] if key in f else None for f in found]
        return values if any(v is not None for v in values) else None

    return [
        {
            "round": record["round"],
            "seconds": record["seconds"],
            "train_loss": means(record["scores"], "loss") or [None] * len(plan.sites),
            "served": scores(after, "served") if record["round"] in measured else None,
            "before_averaging": scores(record["scores"], "before"),
            "client_share": None,  # made of y, which stays where it is
            "second_order_share": means(record["scores"], "second_order"),
            "ranks": None,  # likewise
        }
        for record, after in zip(session.records, later)
    ]


def sent_bytes(plan: Plan, session: ServerSession) -> dict[str, float]:
    """What a site sends up in a round, the mean over sites."""
    if session.common is None:
        return {"adapter": 0, "head": 0}
    size = session.dtype.itemsize
    entries = session.layout.shared_entries
    head = size * sum(e.size for e in entries if e.kind == "head")
    ranks = [session.ranks.get(site) for site in plan.sites]
    each = [
        sum(torch.Size(messages.truncated(e, r)).numel() for e in entries if e.kind != "head") for r in ranks
    ]
    return {"adapter": size * sum(each) / len(each), "head": head}


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
        shutil.copytree(state / "clients" / client, out / "clients" / client, dirs_exist_ok=True)
        target = out / "state" / "clients"
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(state / "state" / "clients" / f"{client}.safetensors", target)
