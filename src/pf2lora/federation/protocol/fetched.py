"""A finished run as a run folder for the lead: the common adapter for PEFT, the result, the report.

It is made of what the server holds, and of the base model, which the lead has as everybody has. Clients' adapters are
not in it: they are the sites' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pf2lora import atomic
from pf2lora.adapters.base_model import fresh_parameters, weights_digest
from pf2lora.data.client import Client
from pf2lora.engines.batches import Encoded
from pf2lora.errors import UserError
from pf2lora.federation.protocol import outcome, server_checkpoint
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.records import RECORDS
from pf2lora.federation.protocol.run_status import FINAL
from pf2lora.federation.protocol.site_setup import digest, model_settings
from pf2lora.parsing import read_text
from pf2lora.run import folder as run_folder
from pf2lora.run.config import from_dict, merged, to_toml
from pf2lora.run.result import Result
from pf2lora.run.workload import DTYPES, Workload, build_task, choose_device, load_base

PLAN = "plan.json"


def handed_out(folder: Path) -> list[Path]:
    """The files of a run's folder on the server that `build` needs."""
    newest = server_checkpoint.newest(folder)
    if newest is None:
        return [folder / PLAN, folder / FINAL]
    best = server_checkpoint.best_file(folder, server_checkpoint.round_of(newest))
    return [folder / PLAN, folder / FINAL, folder / RECORDS, newest, *([best] if best else [])]


def build(folder: Path, out: Path, model: str, *, force: bool = False, traits: Sequence[str] = ()) -> Result:
    """Write the run of `handed_out`'s files in `folder` into the run folder `out`; `model` is where its base model is
    here, `traits` what the lead knows of the sites' rows. The common adapter in it can be used like any run's."""
    plan = Plan.from_json(read_text(folder / PLAN))
    place = (
        str(Path(model).resolve()) if Path(model).is_dir() else model
    )  # for who opens the folder elsewhere
    own = {"model": {"name": place, "device": "cpu"}, "training": {"method": [plan.method], "seeds": 1}}
    config = from_dict(merged(plan.config, own), str(folder / PLAN))
    newest = server_checkpoint.newest(folder)
    if newest is None:
        raise UserError(f"the run {plan.name!r} has no finished round: there is nothing to fetch")
    facts = server_checkpoint.facts_of(server_checkpoint.read(newest)[0], newest)
    device = choose_device(config.model.device)
    # In which precision the sites hold it is their own affair, but for all the same one: the digest knows it.
    for precision in DTYPES:
        config = replace(config, model=replace(config.model, precision=precision))
        task = build_task(config, plan.labels, plan.metric)
        base = load_base(config, task, device)
        if facts["model"] == digest(base, model_settings(base.config.to_dict()), fresh_parameters(base)):
            break
    else:
        raise UserError(
            f"{model!r} is another base model than the sites have (the digests of config and weights differ): --model "
            f"names a copy of theirs"
        )
    clients: list[Client[Any]] = [Client(site, [], []) for site in plan.sites]
    tokens = {"input_ids": torch.zeros(0, 1, dtype=torch.int32)}
    nothing = Encoded(tokens, {}, np.zeros(0, dtype=np.int64), (0,) * (len(clients) + 1))
    run_folder.claim(out, force=force)
    anywhere = replace(config, model=replace(config.model, device="auto"))
    atomic.write_text(out / "config.toml", to_toml(anywhere))
    weights = weights_digest(base)
    workload = Workload(
        config=config,
        task=task,
        clients=clients,
        base=base,
        train=nothing,
        test=nothing,
        validation=None,
        validation_sample=None,
        device=device,
        weights=weights,
    )
    return outcome.collect(plan, workload, folder, out, [], traits)
