"""A federation of real processes for tests: kits, server, sites, and the means to kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from small_federation import write_data, write_model, write_site_file

from pf2lora.federation.flare import admin, processes
from pf2lora.federation.flare.provision import Project, provision
from pf2lora.federation.protocol import run_status
from pf2lora.federation.protocol.plan import Plan

LEAD, GUEST = "lead@pf2lora.local", "guest@pf2lora.local"


@dataclass
class Flare:
    """The processes of a federation under `root`."""

    root: Path
    plan: Plan
    kits: dict[str, Path]
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    environment: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return run_status.run_folder(self.kits["server"], self.plan.name)

    def start(self, *names: str) -> None:
        """Start participants and wait until they are there."""
        began = time.time()

        def registered(name: str) -> bool:
            file = self.kits["server"] / run_status.SITES / name
            return file.exists() and file.stat().st_mtime >= began

        for name in names:
            with (self.root / f"{name}.log").open("ab") as log:
                settings = {"OMP_NUM_THREADS": "1"} | self.environment.get(name, {})
                self.started[name] = processes.start(processes.open_kit(self.kits[name]), log, settings)
        for name in names:
            if name != "server":
                self.wait(partial(registered, name), 90, f"{name} to register")

    def submit(self) -> str:
        return admin.submit(self.kits[LEAD], self.plan)

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited {seconds} s for {what}; said: {self.said()}"
            time.sleep(0.1)

    def said(self) -> list[str]:
        return run_status.read_lines(self.run)

    def says(self, words: str) -> bool:
        return any(words in line for line in self.said())

    def round(self) -> int:
        status = run_status.read_status(self.run)
        return status.round if status else 0

    def state(self) -> str:
        status = run_status.read_status(self.run)
        return status.state if status else ""

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """SIGKILL to a participant and all its processes, as when its machine loses power."""
        process = self.started.pop(name)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            member.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(family, timeout=10)

    def kill_job(self, name: str) -> None:
        """SIGKILL to a participant's job process only, as when memory runs out."""
        for child in psutil.Process(self.started[name].pid).children(recursive=True):
            os.kill(child.pid, signal.SIGKILL)


@contextmanager
def flare(root: Path, plan: Plan) -> Iterator[Flare]:
    """Provisioned and not yet started; everything started is stopped at the end."""
    if not (root / "model").exists():
        write_model(root / "model")
        write_data(root, plan.sites)
    project = Project(
        "trial", "localhost", plan.sites, port=processes.free_port(), lead=LEAD, members=(GUEST,)
    )
    kits = provision(project, root / "kits")
    for site in plan.sites:
        write_site_file(kits[site] / "local" / "site.toml", root, site)
    made = Flare(root, plan, kits)
    try:
        yield made
    finally:
        processes.stop(*made.started.values())
