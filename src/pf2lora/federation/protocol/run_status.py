"""The folder of a federated run in a kit: where it stands, at the server and, by itself, at each site; and what was
said."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pf2lora import atomic
from pf2lora.errors import UserError
from pf2lora.parsing import read_json
from pf2lora.run.decode import decode

SITES = "registered"  # a file per site, as old as its way to this server
ALIVE = "alive"  # a file per site, as old as its last heartbeat
ENDED = "ended"  # a file per site that holds the last job whose part at the site is over
UNFINISHED = ("running", "waiting", "continue")
RUN = "pf2lora_run"  # in a job's description: what its run needs before it begins
CONTINUES = "pf2lora_continues"  # likewise: the job that it goes on with
WAIT = 3600.0  # seconds below the quorum, where a job's description does not say
STATUS, LINES, JOBS, FINAL = "status.json", "lines.jsonl", "jobs", "final.json"


@dataclass
class Status:
    """`state` is queued (FLARE waits for sites, or for another run's end), running, waiting (below its quorum),
    continue (a new job takes over), stopped, failed or finished; `line` says why. `absent` are the sites that were not
    there at the end."""

    state: str
    round: int
    rounds: int
    job: str = ""
    line: str = ""
    present: list[str] = field(default_factory=list)
    # Of the last round's training: at the server the mean over the sites that told it, at a site its own.
    loss: float | None = None
    seconds: float | None = None  # the last round took: at a site its own work
    received: int = 0  # bytes of messages of this job
    sent: int = 0
    absent: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # with the reason
    # At the server: how often a new job began for a site since it last answered, and until when none does.
    returns: dict[str, int] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)
    deadline: float = 0.0
    quorum: float = 0.0
    refused: bool = False  # of a job that was not let into the run of its name
    time: float = 0.0


def run_folder(root: Path, name: str) -> Path:
    """The folder of the run `name` in the kit `root`."""
    return root / "runs" / name


def write_status(folder: Path, status: Status, *, of_run: bool = True) -> None:
    """Where a job stands, and with it the run; not the run, if the job may not touch it. A site names no job."""
    status.time = time.time()
    if status.job:
        (folder / JOBS).mkdir(exist_ok=True)
        atomic.write_json(folder / JOBS / f"{status.job}.json", asdict(status))
    if of_run:
        atomic.write_json(folder / STATUS, asdict(status))


def read_status(folder: Path, job: str = "") -> Status | None:
    """Where the run stands, or one job of it."""
    file = folder / JOBS / f"{job}.json" if job else folder / STATUS
    try:
        return decode(Status, read_json(file), str(file))
    except UserError:
        return None


def job_of_run(jobs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the jobs under a run's name, by their descriptions and the newest first, the one that the run goes on with: it
    began or continues one that did, and was let in. Another plan may wait under that name, or have been refused."""
    let_in = [job for job in jobs if not (job.get("pf2lora") or {}).get("refused")]
    began = [job for job in let_in if any(job.get(key) for key in ("start_time", "cloned_from", CONTINUES))]
    return next(iter(began or let_in), None)


def read_final(folder: Path) -> dict[str, dict[str, Any]]:
    """The sites' last scores, as far as they are known."""
    file = folder / FINAL
    found: dict[str, dict[str, Any]] = read_json(file) if file.is_file() else {}
    return found


def mean_loss(answers: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The mean over sites of a round's mean training loss; None where none told it, as in a private run, or one alone:
    that would be its own."""
    losses = [told["loss"] / told["steps"] for told in answers.values() if {"loss", "steps"} <= told.keys()]
    return sum(losses) / len(losses) if len(losses) > 1 else None


def append_line(folder: Path, line: str) -> None:
    """One line about the run, for whoever watches."""
    atomic.append_line(folder / LINES, json.dumps({"time": time.time(), "line": line}, ensure_ascii=False))


def read_lines(folder: Path, skip: int = 0) -> list[str]:
    """The lines after the first `skip`."""
    try:
        text = (folder / LINES).read_text(encoding="utf8")
    except OSError:
        return []
    return [said for line in text.splitlines()[skip:] if (said := line_in(line))]


def line_in(text: str) -> str:
    """What a line of the file says; nothing where a full disk cut it off."""
    try:
        return str(json.loads(text)["line"])
    except (ValueError, KeyError, TypeError):
        return ""
