"""What the lead does from anywhere: submit a run, see how it stands, stop it, go on with it."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError, listed
from pf2lora.federation import require_nvflare
from pf2lora.federation.flare.keys import REMOVED_CODE
from pf2lora.federation.flare.processes import expiry_warning
from pf2lora.federation.flare.provision import SCOPE, SERVER_CLASSES, SITE_CLASSES
from pf2lora.federation.kit import Kit
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.run_status import RUN, UNFINISHED, WAIT, Status, job_of_run
from pf2lora.federation.protocol.signed_plan import SignedPlan
from pf2lora.run.decode import decode

ANSWER = 15.0  # seconds in which a server answers
LOOK = 2.0  # seconds between looks at a run that is followed
POLL = 0.1  # seconds between a site's questions for work
HANDED_OUT = "pf2lora"  # in the folder of a job on the server: what the lead may have of the run
ACTIVE = ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")  # FLARE's words for a job that is not over


@dataclass(frozen=True)
class Queued:
    """What is told of a run before it begins, as its job says it."""

    sites: list[str]
    rounds: int
    deadline: float
    quorum: float
    wait: float = WAIT

    def status(self, connected: Collection[str], needed: int) -> Status:
        """Where it stands in FLARE's queue."""
        found = Status("queued", 0, self.rounds, deadline=self.deadline, quorum=self.quorum)
        found.present = [site for site in self.sites if site in connected]
        absent = [site for site in self.sites if site not in connected]
        if len(found.present) < needed:
            found.line = f"it waits for sites, of which {needed} are needed: {listed(absent)} not connected"
        return found


def write_job(plan: Plan, signed: SignedPlan, folder: Path) -> Path:
    """FLARE's job folder. It carries the plan, as the lead signed it, and two class names: no code, no data."""
    job = folder / plan.name
    config = job / "app" / "config"
    config.mkdir(parents=True)
    meta = {
        "name": plan.name,
        "resource_spec": {},
        # The plan's alone: of @ALL, FLARE counts anybody, and sends everybody every plan. Who is away when a job begins
        # is not in it, and gets into the run's next one.
        "deploy_map": {"app": ["server", *plan.sites]},
        "min_clients": plan.needed(len(plan.sites)),
        "scope": SCOPE,
        RUN: asdict(
            Queued(list(plan.sites), plan.run.training.rounds, plan.deadline, plan.quorum, plan.wait)
        ),
    }
    args = asdict(signed)
    server = {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": POLL},
        "workflows": [{"id": "rounds", "path": SERVER_CLASSES[0], "args": args}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": {"path": SITE_CLASSES[0], "args": args}}],
    }
    for path, value in (
        (job / "meta.json", meta),
        (config / "config_fed_server.json", server),
        (config / "config_fed_client.json", client),
    ):
        atomic.write_json(path, value)
    return job


@contextmanager
def session(kit: Path) -> Iterator[Any]:
    """A session of the person whose kit this is; what the engine prints stays out of the way."""
    require_nvflare()
    file = kit / "startup" / "fed_admin.json"
    if not file.is_file():
        raise UserError(f"{str(kit)!r} is no person's kit: submit, status and stop take the lead's")
    from nvflare.apis.fl_exception import FLCommunicationError
    from nvflare.fuel.f3.cellnet.cell_cipher import InvalidCertChain
    from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError, NoConnection
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    settings = json.loads(file.read_text())["admin"]
    line = expiry_warning(Kit(kit, settings["username"], server=False))
    if line:
        print(line, file=sys.stderr, flush=True)
    where = f"{settings['host']}:{settings['port']}"
    was_removed = f"{settings['username']} was removed from the federation at {where}"
    chatter = StringIO()
    found = None
    try:
        with redirect_stdout(chatter), redirect_stderr(chatter):
            found = new_secure_session(settings["username"], str(kit.resolve()), timeout=ANSWER)
        yield found
    except AuthorizationError:
        raise UserError(f"{settings['username']} may not do this: its role is not the lead's") from None
    except (AuthenticationError, InvalidCertChain) as error:
        who = settings["username"]
        if getattr(error, "auth_code", None) == REMOVED_CODE:
            raise UserError(was_removed) from None
        raise UserError(f"{who}'s certificate is not of the authority of the federation at {where}") from None
    except FLCommunicationError as error:
        if (
            "is disabled" not in f"{error} {error.__context__}"
        ):  # by FLARE, which reads its list when it starts
            raise
        raise UserError(was_removed) from None
    except NoConnection:
        raise UserError(f"no server answers at {where}: is it started, and is the address right?") from None
    finally:
        if found is not None:
            with redirect_stdout(chatter), redirect_stderr(chatter):
                found.close()


def submit(kit: Path, plan: Plan) -> str:
    """Hand the plan to the server; the job's id. Which sites it waits for is said aloud."""
    from nvflare.fuel.flare_api.api_spec import InvalidJobDefinition

    with session(kit) as flare, tempfile.TemporaryDirectory() as scratch:
        try:
            signed = SignedPlan.by(KitIdentity.of(kit / "startup"), plan)
            folder = write_job(plan, signed, Path(scratch))
            job = str(flare.submit_job(str(folder)))
        except InvalidJobDefinition as error:
            raise UserError(str(error).removeprefix("invalid job definition: ")) from None
        (found,) = [found for found in with_status(flare) if found["job_id"] == job]
        waits = (found.get("pf2lora") or {}).get("line")
        if found["status"] == "SUBMITTED" and waits:
            print(f"run {plan.name!r}: {waits}", file=sys.stderr, flush=True)
        return job


def runs(kit: Path) -> list[dict[str, Any]]:
    """Every job of this federation, newest first; `pf2lora` says where it stands or how it ended."""
    with session(kit) as flare:
        return with_status(flare)


def follow(kit: Path, name: str) -> Iterator[dict[str, Any]]:
    """The newest job of a run with where it stands, every few seconds until the run is over."""
    with session(kit) as flare:
        while True:
            jobs = [job for job in with_status(flare) if job["name"] == name]
            if not jobs:
                raise UserError(f"there is no run {name!r} here: `status` lists those that there are")
            yield jobs[0]
            if not any(job["status"] in ACTIVE for job in jobs) and state_of(jobs[0]) not in UNFINISHED:
                return
            time.sleep(LOOK)


def with_status(flare: Any) -> list[dict[str, Any]]:
    """The jobs that there are, newest first; of those that run, their own word is asked for, and of those that wait,
    which sites they wait for."""
    from nvflare.fuel.flare_api.api_spec import InternalError, JobNotFound, JobNotRunning

    found: list[dict[str, Any]] = flare.list_jobs(detailed=True)
    waiting = [job for job in found if job["status"] == "SUBMITTED" and RUN in job]
    if waiting:
        connected = {client.name for client in flare.get_system_info().client_info}
        for job in waiting:
            queued = decode(Queued, job[RUN], "the job's description")
            job["pf2lora"] = asdict(queued.status(connected, int(job.get("min_clients") or 1)))
    for job in found:
        if job["status"] == "RUNNING":
            with suppress(JobNotFound, JobNotRunning, InternalError):  # it may end while we look
                stats = flare.show_stats(job["job_id"], "server")
                job["pf2lora"] = stats.get("server", {}).get("pf2lora")
    return sorted(found, key=lambda job: job["submit_time"], reverse=True)


def state_of(job: dict[str, Any]) -> str:
    """Where a job's run stands, in our words, or else FLARE's."""
    return str((job.get("pf2lora") or {}).get("state") or job["status"].lower())


def stop_run(kit: Path, name: str) -> list[str]:
    """Stop the jobs of a run; their ids. One that cannot be stopped does not keep the others from it."""
    from nvflare.fuel.flare_api.api_spec import InternalError

    with session(kit) as flare:
        stopped, stuck = [], []
        for job in [job for job in jobs_of(flare, name) if job["status"] in ACTIVE]:
            try:
                flare.abort_job(job["job_id"])
                stopped.append(job["job_id"])
            except InternalError:
                stuck.append(job["job_id"])
    if stuck and not stopped:
        raise UserError(
            f"run {name!r}: the server has no process of job {stuck[0]}, and could not write that down (is its disk "
            f"full?): start it again"
        )
    return stopped


def resume_run(kit: Path, name: str) -> str:
    """Go on with a run that was stopped, as it was submitted; the job's id."""
    with session(kit) as flare:
        found = jobs_of(flare, name)
        if not found:
            raise UserError(f"there is no run {name!r} here: `status` lists those that there are")
        if any(job["status"] in ACTIVE for job in found):
            raise UserError(f"run {name!r} is going on already")
        job = job_of_run(found)
        if job is None:
            raise UserError(f"run {name!r} has not begun: {found[0]['pf2lora']['line']}")
        if (job.get("pf2lora") or {}).get("state") == "finished":
            raise UserError(f"run {name!r} is finished; the same `submit` with more --rounds goes on")
        return str(flare.clone_job(job["job_id"]))


def fetch(kit: Path, name: str, into: Path) -> Path:
    """Download what the server hands out of a finished run; the folder in `into` that holds it."""
    with session(kit) as flare:
        found = [job for job in jobs_of(flare, name) if (job.get("pf2lora") or {}).get("state") == "finished"]
        if not found:
            raise UserError(f"no run {name!r} is finished here: `status` says how runs stand")
        place = Path(flare.download_job_result(found[0]["job_id"], str(into)))
    files = [file for file in place.rglob("plan.json") if file.parent.name == HANDED_OUT]
    if not files:
        raise UserError(
            f"the server's kit is older than this version: job {found[0]['job_id']} holds no result"
        )
    return files[0].parent


def jobs_of(flare: Any, name: str) -> list[dict[str, Any]]:
    """The jobs of a run, newest first."""
    found = [job for job in flare.list_jobs(detailed=True) if job["name"] == name]
    return sorted(found, key=lambda job: job["submit_time"], reverse=True)
