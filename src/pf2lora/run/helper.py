"""Other processes of this machine that take part in a client's training, one for each accelerator. Run as a module, it
is such a process: it loads the base model, and no data."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from pf2lora.adapters.spec import AdapterSpec
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.helpers import Computing, Helpers, Numbers, serve
from pf2lora.run.compiling import lengths
from pf2lora.run.config import from_dict, to_dict
from pf2lora.run.set_up import Trial
from pf2lora.run.workload import build_task, load_base


def with_helpers(trial: Trial, processes: int) -> Trial:
    """The trial, whose batches are computed by so many processes, this one among them; they are ready then."""
    if processes > 1:
        numbers = Numbers.made(processes - 1, trial.state.x, trial.state.y)
        order = partial(order_for, trial, processes)
        trial.workload.task.helpers = Helpers(numbers, launch, order, lambda: trial.model.repeats_layers)
        trial.workload.task.helpers.start()
    return trial


def order_for(trial: Trial, processes: int, number: int) -> dict[str, Any]:
    """What helper `number` needs to know of the trial: nothing of its rows, nor of the method."""
    workload, model, device = trial.workload, trial.model, str(trial.workload.device)
    if workload.device.type == "cuda":
        device = f"cuda:{number % torch.cuda.device_count()}"
    return {
        "config": to_dict(workload.config),
        "labels": workload.task.labels,
        "adapter": asdict(model.spec),
        "device": device,
        "threads": max(1, torch.get_num_threads() // processes),
        "compiled": lengths(workload) if model.compiled or model.compiles_layers else 0,
    }


def launch(channel: Connection, file: int) -> subprocess.Popen[bytes]:
    """Start a helper; it ends when this process does, whose end of the channel is closed then."""
    ends = channel.fileno(), file
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pf2lora.run.helper", *map(str, ends)],
        pass_fds=ends,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt is for the first process
        env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )


def build(order: Mapping[str, Any]) -> Computing:
    """Base model and adapters as the first process has them."""
    torch.set_num_threads(order["threads"])
    device = torch.device(order["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = from_dict(order["config"], "helper")
    task = build_task(config, order["labels"])
    spec = AdapterSpec(**order["adapter"] | {"targets": tuple(order["adapter"]["targets"])})
    model = TwoLevelModel(load_base(config, task, device), spec)
    if order["compiled"]:
        model.compile(order["compiled"])
    return Computing(partial(task.loss_sums, model), device, model.repeat_layers)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]), build)
