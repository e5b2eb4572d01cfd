"""What a site brings to a run, built from its own files: `site.toml` says where its data, base model and state are."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import pf2lora
from pf2lora.core.layout import Layout
from pf2lora.core.method import Method, State, moved
from pf2lora.data.client import Client, check_name
from pf2lora.data.loading import load_clients
from pf2lora.errors import UserError, unknown
from pf2lora.federation import require_nvflare
from pf2lora.federation.protocol import approvals, ledger, messages
from pf2lora.federation.protocol.batch_secret import private_seed
from pf2lora.federation.protocol.ledger import Ledger
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE, Policy, PolicyBroken, check_plan, read_policy
from pf2lora.federation.protocol.site_masks import SiteMasks, check_maskable
from pf2lora.run.config import Config, from_dict, merged, read_toml
from pf2lora.run.first_notes import of_rows
from pf2lora.run.fitting import fitted
from pf2lora.run.helper import with_helpers
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.workload import load_workload
from pf2lora.settings import checked, column_settings, setting, types_of
from pf2lora.tasks import TASKS

logger = logging.getLogger("pf2lora")

SITE_FILE = "site.toml"
MOST_PROCESSES = 64  # of one machine: more are a slip of the pen
PARTS = ("clients", "test", "validation")  # the settings that name a site's files
FILES = (
    *PARTS,
    "test_ratio",
    "validation_ratio",
    "limit",
)  # of the run's data settings, those that are its own


@dataclass(frozen=True)
class SiteSetup:
    """What a site brings to a run, none of which leaves it but the declared facts."""

    trial: Trial  # of one client, under whose name batches are drawn and adapters are kept
    initial: State  # on the site's device
    facts: dict[str, Any]  # what the server checks before round 1
    plan: Plan
    site: str  # its own name in the plan
    ledger: Ledger  # what it has done for the run
    policy: Policy = field(default_factory=Policy)  # the site's own limits
    masks: SiteMasks | None = None  # in a masked run

    @property
    def client(self) -> str:
        """The client's name."""
        return self.trial.workload.names[0]

    @property
    def method(self) -> Method:
        """What the site trains with."""
        return self.trial.method

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the scores that may leave."""
        return self.policy.metrics_of(tuple(self.trial.workload.task.metrics))

    @property
    def layout(self) -> Layout:
        """The common adapter, and which part of it may be sent."""
        return self.method.layout


@dataclass(frozen=True)
class SiteFile:
    """What a site says about itself, to itself only. Paths are relative to the file. `name` is the client's name,
    where it is another than the site's."""

    name: str = setting("", "the client's name (default: the site's)")
    model: str = setting("", "the base model's folder or hub name")
    state: str = setting("state", "where the site keeps its state")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    processes: int = setting(1, "processes that compute each batch together, one for each accelerator")
    precision: str = setting("float32", "precision of the base model, the same at every site")
    data: Mapping[str, Any] = field(default_factory=dict)


def read_site_file(path: Path, columns: Sequence[str] | None = None) -> SiteFile:
    """The site's own file, checked; an unknown key is named. `columns` are the run's task's settings that name columns
    of data files (without a run yet: any task's); with the files themselves, they are what `[data]` may hold."""
    if columns is None:
        columns = sorted({name for task in TASKS for name in column_settings(TASKS[task])})
    if not path.is_file():
        raise UserError(f"{path} is missing: it names this site's data, base model and state folder")
    values = read_toml(path)
    known = types_of(SiteFile)
    for key in values:
        if key not in (*known, "data"):
            raise UserError(f"{path}: {unknown('key', key, [*known, 'data'])}")
    data = values.get("data", {})
    if not isinstance(data, dict):
        raise UserError(f"{path}: [data] must be a table")
    for key in data:
        if key not in (*FILES, *columns):
            raise UserError(f"{path}: [data] {unknown('key', key, [*FILES, *columns])}")
    if "clients" not in data:
        raise UserError(f'{path}: [data] names no file; give clients = ["train.jsonl"]')
    plain = checked(known, {k: v for k, v in values.items() if k != "data"}, str(path))
    found = SiteFile(**plain, data=data)
    if not found.model:
        raise UserError(f"{path}: model is missing; give the base model's folder or hub name")
    if found.name:
        check_name(found.name, path)
    if not 1 <= found.processes <= MOST_PROCESSES:
        raise UserError(f"{path}: processes is {found.processes}; it must be from 1 to {MOST_PROCESSES}")
    if found.processes > 1 and ":" in found.device:
        raise UserError(
            f"{path}: device is {found.device!r}, and {found.processes} processes would all take it: leave it out, and "
            f"each takes its own"
        )
    return found


def absolute(base: Path, value: str) -> str:
    """A path of the site's file as seen from anywhere; a hub name stays what it is."""
    beside = base / value
    return str(beside) if beside.exists() else value


def site_config(plan: Plan, file: Path) -> tuple[Config, SiteFile]:
    """The run's settings with this site's own data and model in them."""
    columns = column_settings(type(plan.run.task))
    own = read_site_file(file, columns)
    data = {key: value for key, value in own.data.items() if key in FILES}
    for key in PARTS:
        paths = [data[key]] if isinstance(data.get(key), str) else data.get(key, [])
        data[key] = [absolute(file.parent, p) for p in paths]
    model = {"name": absolute(file.parent, own.model), "device": own.device, "precision": own.precision}
    # Processes tell each other something in every step: a recording cannot hold that.
    alone = {} if own.processes == 1 else {"graphs": False}
    here = {
        "model": model | alone,
        "training": {"method": [plan.method], "seeds": 1},
        "task": {key: value for key, value in own.data.items() if key in columns},
        "data": data,
    }
    return from_dict(merged(plan.config, here), str(file)), own


def state_folder(plan: Plan, file: Path) -> Path:
    """Where a site keeps the state of this run, by its own file."""
    columns = column_settings(type(plan.run.task))
    return file.parent / read_site_file(file, columns).state / plan.name


def load_client(
    config: Config, plan: Plan, name: str, notes: list[str] | None = None
) -> tuple[Client[Any], list[str]]:
    """The site's rows, under the client's name: batches are drawn by name, so they are those of a local run. And the
    labels: those that the plan names, or else the rows' own. What the site should know is added to `notes`."""
    agreed = list(plan.labels) or None
    clients = load_clients(config.task, config.data, config.training.seed, labels=agreed, notes=notes)
    labels = agreed or config.task.labels(clients)
    if len(clients) != 1:
        raise UserError(
            f"the site's data makes {len(clients)} clients; a site is one client: give it one file"
        )
    return replace(clients[0], name=name), labels


def build(plan: Plan, file: Path, site: str) -> SiteSetup:
    """Data, base model and method of a site. It sees nobody else's."""
    from pf2lora.adapters.base_model import fresh_parameters

    config, own = site_config(plan, file)
    policy, entry = admitted(plan, file, site, own)
    notes: list[str] = []
    client, labels = load_client(config, plan, own.name or site, notes)
    if len(client.train) < policy.min_rows:
        raise PolicyBroken(plan, "min_rows", policy.min_rows)
    workload = load_workload(config, clients=[client], labels=labels, metric=plan.metric, notes=notes)
    base = workload.base
    fingerprint = digest(base, model_settings(base.config.to_dict()), fresh_parameters(base))
    if policy.models and not {fingerprint, own.model} & set(policy.models):
        raise PolicyBroken(plan, "models")
    place = plan.sites.index(site), len(plan.sites)
    trial = set_up(workload, plan.method, config.training.seed, place=place)
    trial, _ = fitted(with_helpers(trial, own.processes))
    for line in of_rows(workload):
        logger.warning("%s: %s", file, line)
    if not policy.public_batch_order:
        seed = private_seed(config.training.seed, plan.name, state_folder(plan, file).parent)
        trial = replace(trial, source=replace(trial.source, seeds=(seed,)))
    named = hashlib.sha256(json.dumps(labels).encode()).hexdigest()
    facts = {
        "model": fingerprint,
        "labels": named,
        "label_count": len(labels),
        "train_rows": len(client.train),
        "test_rows": len(client.test) if len(client.test) >= policy.min_rows else 0,
        "layout": messages.describe(trial.method.layout),
        "engine": require_nvflare(),
        "version": pf2lora.__version__,
    }
    if plan.masked:
        check_maskable(trial.method)
    masks = SiteMasks.of(plan, file.parent.parent, site, policy, entry)
    return SiteSetup(trial, moved(trial.state, workload.device), facts, plan, site, entry, policy, masks)


def admitted(plan: Plan, file: Path, site: str, own: SiteFile) -> tuple[Policy, Ledger]:
    """The site's policy, which allows the plan, and the run's ledger, which has it now; else `PolicyBroken`."""
    policy, state = read_policy(file.parent / POLICY_FILE), file.parent / own.state
    check_plan(policy, plan, sum(run != plan.name for run in ledger.runs(state)))
    if policy.approve and not approvals.is_approved(file.parent, plan):
        raise PolicyBroken(plan, "approve")
    found = Ledger(state, plan, site, policy.max_repeats)
    found.take()
    return policy, found


def model_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that make two base models the same, wherever they lie and whatever loaded them."""
    ignored = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
    return {k: v for k, v in config.items() if k not in ignored}


def digest(model: torch.nn.Module, config: dict[str, object], fresh: Collection[str] = ()) -> str:
    """A fingerprint of a base model: its settings and every weight but `fresh` ones, which no checkpoint gave."""
    sha = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name in fresh:
            continue
        sha.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
