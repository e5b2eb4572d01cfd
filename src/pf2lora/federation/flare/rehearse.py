"""A whole federation on one machine: a throw-away authority, a server, one process per site, mutual TLS on loopback."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.data.client import Client
from pf2lora.errors import UserError
from pf2lora.federation.flare import admin, processes
from pf2lora.federation.flare.processes import open_kit
from pf2lora.federation.flare.provision import Project, provision
from pf2lora.federation.kit import Kit
from pf2lora.federation.protocol import outcome, run_status
from pf2lora.federation.protocol.names import site_names
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE, Policy
from pf2lora.federation.protocol.policy import to_toml as to_policy_toml
from pf2lora.federation.protocol.site_setup import SITE_FILE
from pf2lora.folder_lock import locked
from pf2lora.run import folder as run_folder
from pf2lora.run.cadence import said_aloud
from pf2lora.run.comparison import prepare
from pf2lora.run.config import Config, to_toml
from pf2lora.run.result import Result
from pf2lora.run.workload import Workload

FOLDER = "federation"
LEAD = "lead@pf2lora.local"
STARTING = 180.0  # seconds for server and sites to find each other
ENDED = ("finished", "failed", "stopped")

Tell = Callable[[str], None]


def rehearse(
    config: Config,
    out: Path,
    *,
    options: dict[str, Any],
    force: bool,
    tell: Tell,
    policy: Policy | None = None,
    per_site: int = 1,
) -> Result:
    """Run `config` in a federation of its clients and leave a normal run folder. An unfinished one is resumed. Every
    site has the limits of `policy` (default: those of a site that sets none), and computes with
    so many processes (`per_site`)."""
    workload = prepare(config)
    labels = tuple(workload.task.labels)
    plan = Plan.of(said_aloud(workload), "rehearsal", site_names(workload.names), labels, **options)
    with locked(out):
        folder = out / FOLDER
        set_up(plan, workload, out, folder, force=force, tell=tell, per_site=per_site)
        return rehearse_in(out, folder, plan, workload, policy or Policy(), tell)


def rehearse_in(
    out: Path, folder: Path, plan: Plan, workload: Workload, policy: Policy, tell: Tell
) -> Result:
    """The rehearsal of a plan, while nobody else writes into its folder."""
    for site in plan.sites:  # with the batches of `pf2lora train`, whose numbers a rehearsal has
        own = dataclasses.replace(policy, public_batch_order=True)
        atomic.write_text(folder / "kits" / site / "local" / POLICY_FILE, to_policy_toml(own))
    server = open_kit(folder / "kits" / "server")
    run = run_status.run_folder(server.folder, plan.name)
    try:
        status = carry_out(plan, folder, server, run, tell)
    except KeyboardInterrupt:
        known = run_status.read_status(run)
        done = known.round if known else 0
        tell(f"stopped, all processes ended; the same command resumes after round {done}")
        raise
    if status.state != "finished":
        raise UserError(f"{status.line} (logs: {folder / 'logs'})")
    return outcome.collect(
        plan, workload, run, out, [folder / "sites" / site / "state" for site in plan.sites]
    )


def set_up(
    plan: Plan, workload: Workload, out: Path, folder: Path, *, force: bool, tell: Tell, per_site: int = 1
) -> None:
    """Kits and each site's own files, unless an unfinished rehearsal of the same plan is there already."""
    file = folder / "plan.json"
    if file.is_file() and not force:
        if json.loads(file.read_text()) != json.loads(plan.to_json()):
            raise UserError(
                f"{str(out)!r} holds another rehearsal; choose another --out, or --force to replace it"
            )
        if not (out / "result.json").exists():
            tell("resuming the rehearsal that is here")
            return
    run_folder.claim(out, force=force)
    shutil.rmtree(folder, ignore_errors=True)
    atomic.write_text(out / "config.toml", to_toml(workload.config))
    project = Project("rehearsal", "localhost", plan.sites, port=processes.free_port(), lead=LEAD)
    kits = provision(project, folder / "kits")
    for client, site in zip(workload.clients, plan.sites):
        write_site(client, workload.config, folder / "sites" / site, kits[site], per_site)
        if client.name != site:
            tell(f"client {client.name!r} takes part as site {site!r}")
    atomic.write_text(file, plan.to_json())


def write_site(client: Client[Any], config: Config, folder: Path, kit: Path, per_site: int = 1) -> None:
    """What a real site would have of its own: data files, and the file that names them."""
    import tomli_w

    data: dict[str, Any] = {}
    parts = {"clients": client.train, "test": client.test, "validation": client.validation}
    for key, part in parts.items():
        if key == "validation" and not part:
            data["validation_ratio"] = 0.0  # else the site would set some of the training rows aside
            continue
        file = folder / key / f"{folder.name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(file, "w", encoding="utf8", opener=private) as lines:
            for row in part:
                lines.write(json.dumps(config.task.to_record(row), ensure_ascii=False) + "\n")
        data[key] = [str(file.resolve())]
    model = Path(config.model.name)
    own = {
        "name": client.name,
        "model": str(model.resolve()) if model.exists() else config.model.name,
        "state": str((folder / "state").resolve()),
        "device": config.model.device,
        "processes": per_site,
        "precision": config.model.precision,
        "data": data | config.task.record_columns(client.train),
    }
    atomic.write_text(kit / "local" / SITE_FILE, tomli_w.dumps(own))


def private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: a rehearsal's rows are copies of real ones."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)  # where it was there before, too
    return handle


def carry_out(plan: Plan, folder: Path, server: Kit, run: Path, tell: Tell) -> run_status.Status:
    """Start everybody, submit, watch; everything that was started is stopped at the end."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    cores = max(1, (os.cpu_count() or 1) // len(plan.sites))
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}
    started: dict[str, Any] = {}
    said = len(run_status.read_lines(run))
    began = time.time()
    with processes.running(started):
        for kit in (server, *(open_kit(folder / "kits" / site) for site in plan.sites)):
            with (logs / f"{kit.name}.log").open("ab") as log:
                started[kit.name] = processes.start(kit, log, environment)
            if kit.server:
                wait_for(lambda: listening(server.port), started, logs, "the server to listen")
        there = [server.folder / run_status.SITES / site for site in plan.sites]
        wait_for(lambda: all(newer(f, began) for f in there), started, logs, "the sites to register")
        tell(f"server and {len(plan.sites)} sites are connected on port {server.port} (mutual TLS)")
        admin.submit(folder / "kits" / LEAD, plan)
        while True:
            for line in run_status.read_lines(run, said):
                tell(line)
                said += 1
            status = run_status.read_status(run)
            if status and status.time > began and status.state in ENDED:
                return status
            check_alive(started, logs)
            time.sleep(0.2)


def wait_for(condition: Callable[[], bool], started: dict[str, Any], logs: Path, what: str) -> None:
    """Wait until `condition` holds; a UserError if a process ended or it takes too long."""
    until = time.monotonic() + STARTING
    while not condition():
        check_alive(started, logs)
        if time.monotonic() > until:
            raise UserError(f"waited {STARTING:g} s for {what}; the logs are in {logs}")
        time.sleep(0.1)


def check_alive(started: dict[str, Any], logs: Path) -> None:
    """A UserError that names the log of a process that has ended."""
    for name, process in started.items():
        if process.poll() is not None:
            raise UserError(
                f"{name} ended by itself (exit code {process.returncode}); its log is {logs / name}.log"
            )


def newer(file: Path, when: float) -> bool:
    """Whether a file was touched since `when`, give or take a file system's clock."""
    return file.exists() and file.stat().st_mtime >= when - 1


def listening(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("localhost", port)) == 0
