"""What a site has for a run, looked at before there is one: rules, data, base model, disk, one step of training.

Nothing is sent, and nothing is written into the site's state folder.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pf2lora.errors import UserError, one_line
from pf2lora.federation.protocol import batch_secret
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE, Policy, PolicyBroken, check_plan, read_policy
from pf2lora.run import numbers

if TYPE_CHECKING:
    from pf2lora.data.client import Client
    from pf2lora.run.config import Config
    from pf2lora.run.workload import Workload

OK, WARNING, WRONG, SKIPPED = "ok", "warning", "wrong", "skipped"
FULL, NARROW = 200e6, 2e9  # free bytes under which a disk is too full, or soon may be


@dataclass(frozen=True)
class Check:
    """What one look found: `state` is ok, warning, wrong or skipped; `line` what is there, or what would be right."""

    name: str
    state: str
    line: str


class Doubt(Exception):
    """What a check has to say where things are not wrong, and may become so."""


class Skipped(Exception):
    """A check that cannot be done before another is right."""


def examine(name: str, look: Callable[[], str]) -> Check:
    """Do one check. Whatever it meets is what it found: the others are still to be looked at."""
    try:
        return Check(name, OK, look())
    except Doubt as doubt:
        return Check(name, WARNING, one_line(doubt))
    except Skipped as reason:
        return Check(name, SKIPPED, one_line(reason))
    except UserError as error:
        return Check(name, WRONG, one_line(error))
    except Exception as error:
        return Check(name, WRONG, one_line(f"{type(error).__name__}: {error}"))


def free_space(folder: Path) -> str:
    """Room on the disk of a folder, which must be, or can be made, writable."""
    there = folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there} may not be written by this user: it holds, or would hold, {folder}")
    free = shutil.disk_usage(there).free
    line = f"{numbers.size(free)} free for {folder}"
    if free < FULL:
        raise UserError(
            f"{line}: a round's state may not fit; free some space ({numbers.size(NARROW)} or more)"
        )
    if free < NARROW:
        raise Doubt(f"{line}: it may become full; {numbers.size(NARROW)} or more are comfortable")
    return line


def owners_alone(path: Path) -> None:
    """A UserError where others can read a file that is not for them."""
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise UserError(f"{path} can be read by others: chmod 600 it")


def plan_for(config: Config, site: str, labels: tuple[str, ...]) -> Plan:
    """A run as the site alone would see it; where no labels are named, they are those of its rows."""
    if labels or not config.task.labelled:
        return Plan.of(config, "doctor", (site,), labels)
    return replace(Plan.of(config, "doctor", (site,), ("some", "others")), labels=())


class SiteCheckup:
    """The parts that a site of the `plan` builds, one after the other, each when it is looked at. `file` is its
    site.toml."""

    def __init__(self, plan: Plan, file: Path, site: str, *, of_run: bool) -> None:
        self.plan, self.file, self.site, self.of_run = plan, file, site, of_run
        self.policy = Policy()
        self.config: Config | None = None
        self.client: Client[Any] | None = None
        self.workload: Workload | None = None
        self.notes: list[str] = []  # what the reader has to say of the rows

    def rules(self) -> str:
        """policy.toml can be read, and allows the run if one is named."""
        path = self.file.parent / POLICY_FILE
        self.policy = read_policy(path)
        if not path.exists():
            raise Doubt(f"{path} is not there: the defaults hold")
        if self.of_run:
            check_plan(self.policy, self.plan, 0)
        return f"{path} is valid" + (" and allows the run" if self.of_run else "")

    def own_file(self) -> str:
        """site.toml can be read."""
        from pf2lora.federation.protocol.site_setup import site_config

        self.config, self.own = site_config(self.plan, self.file)
        return f"{self.file} is valid"

    def disk(self) -> str:
        """Room for the site's state, and its secret is one."""
        if self.config is None:
            raise Skipped("site.toml says where the state is")
        state = self.file.parent / self.own.state
        owners_alone(state / batch_secret.FILE)
        return free_space(state)

    def data(self) -> str:
        """The rows of each part, read as the run would read them."""
        from pf2lora.data.files import columns_of, expand_paths
        from pf2lora.federation.protocol.site_setup import load_client

        if self.config is None:
            raise Skipped("site.toml says where the data is")
        task = self.config.task
        name = self.own.name or self.site
        self.client, self.labels = load_client(self.config, self.plan, name, self.notes)
        columns = columns_of(task.read_records(expand_paths(self.config.data.clients)[0]))
        if len(self.client.train) < self.policy.min_rows:
            raise PolicyBroken(self.plan, "min_rows", self.policy.min_rows)
        parts = {
            "training": self.client.train,
            "test": self.client.test,
            "validation": self.client.validation,
        }
        rows = ", ".join(f"{len(part):,} {name}" for name, part in parts.items())
        labels = f"; {len(self.labels)} labels" if self.labels else ""
        line = f"{rows} rows for {task.name}; columns {', '.join(columns)}{labels}"
        if 0 < len(self.client.test) < self.policy.min_rows:
            raise Doubt(
                f"{line}; scores of fewer than {self.policy.min_rows} test rows (min_rows) stay at home"
            )
        return line

    def model(self) -> str:
        """The base model, which loads on its device, with the digest that must be every site's."""
        from pf2lora.adapters.base_model import fresh_parameters
        from pf2lora.federation.protocol.site_setup import digest, model_settings
        from pf2lora.run.workload import load_workload

        if self.config is None or self.client is None:
            raise Skipped("it is loaded for the data, which is wrong")
        workload = load_workload(
            self.config,
            clients=[self.client],
            labels=self.labels,
            metric=self.plan.metric,
            notes=self.notes,
        )
        base = workload.base
        found = digest(base, model_settings(base.config.to_dict()), fresh_parameters(base))
        if self.policy.models and not {found, self.own.model} & set(self.policy.models):
            raise PolicyBroken(self.plan, "models")
        self.workload = workload
        size = sum(parameter.numel() for parameter in base.parameters())
        return f"{self.own.model}: {numbers.count(size)} parameters on {workload.device}, digest {found}"

    def step(self) -> str:
        """One local step, of which nothing is kept."""
        from pf2lora.core.method import moved
        from pf2lora.engines.steps import local_steps
        from pf2lora.run import costs
        from pf2lora.run.helper import with_helpers
        from pf2lora.run.set_up import set_up

        if self.workload is None:
            raise Skipped("it needs data and model, of which one is wrong")
        device = self.workload.device
        costs.start_memory_count(device)
        began = time.perf_counter()
        trial = set_up(self.workload, self.plan.method, self.workload.config.training.seed)
        with_helpers(trial, self.own.processes)
        state = moved(trial.state, device)
        (variant,) = trial.method.variants_for_round(state, 1)
        _, stats = local_steps(variant, trial.F, state, trial.source, clients=[0], first_step=[0], steps=1)
        loss, seconds = float(stats.loss.sum()), time.perf_counter() - began
        trial.model.remove()
        if (helpers := trial.workload.task.helpers) is not None:
            helpers.close()
        if not math.isfinite(loss):
            raise UserError(
                'the loss of the first step is no number: look at the data, or use precision = "float32"'
            )
        memory = costs.peak_memory(device)
        room = f", at most {numbers.size(memory)} on {device}" if memory else ""
        by = f" in {self.own.processes} processes" if self.own.processes > 1 else ""
        return f"{trial.method.label}: loss {loss:.4f} after {numbers.duration(seconds)}{by}{room}"

    def rows(self) -> str:
        """What the run would say of the rows."""
        from pf2lora.run.first_notes import of_rows

        if self.workload is None:
            raise Skipped("it needs data and model, of which one is wrong")
        if lines := of_rows(self.workload):
            raise Doubt("; ".join(lines))
        return "nothing in them that a run would warn of"
