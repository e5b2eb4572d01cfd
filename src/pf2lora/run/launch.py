"""A run that torchrun has started as several processes: how this one joins the others, and which of them speaks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pf2lora.errors import UserError

if TYPE_CHECKING:
    from pf2lora.engines.processes import Processes
    from pf2lora.run.workload import Workload

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun says to its processes
TIMEOUT = 1800.0  # seconds that processes wait for the slowest; one that has ended is noticed at once
LATER = 1.0  # seconds by which the other processes let the first speak

_stores: list[Any] = []  # where the processes met, once they have


class Spare(SystemExit):
    """This process has no client, and ends well."""


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """As how many processes torchrun, or a launcher that speaks as it does, has started this one; 1 where none has."""
    if not all(environment.get(name) for name in LAUNCHED):
        return 1
    return int(environment["WORLD_SIZE"])


def quiet_torch() -> None:
    """Before torch is loaded: where a process ends, those beside it shall not print stacks of its C++ code."""
    if launched() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def check_alone(what: str, why: str) -> None:
    """A UserError where several processes would do `what` each for itself."""
    if launched() > 1:
        raise UserError(f"{what} runs in one process: {why}; start it without torchrun")


def join(device: str = "auto") -> Processes:
    """Meet the other processes, where there are any; each takes an accelerator of its own, or the CPU."""
    import torch
    import torch.distributed as dist

    from pf2lora.engines.processes import current

    if launched() == 1 or dist.is_initialized():
        return current()
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"device is {device!r}, and {launched()} processes would all take it: leave it out, and each takes its own"
        )
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        torch.cuda.set_device(local % count)
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= count and dist.is_nccl_available():
            backend = "cpu:gloo,cuda:nccl"  # else some share one, which NCCL does not serve
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT)))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
        )
    except (RuntimeError, ValueError) as error:
        where = "{}:{}".format(*place())
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"the processes of this run do not find each other at {where} ({reason})") from None
    _stores.append(dist.PrefixStore("pf2lora", store))
    return current()


def limited(workload: Workload) -> Workload:
    """The workload with no more processes than clients: those left over have nothing to do, and end."""
    processes, clients = workload.processes, len(workload.clients)
    if processes.size <= clients:
        return workload
    import torch.distributed as dist

    from pf2lora.engines.processes import ALONE

    group = dist.new_group(list(range(clients)), timeout=timedelta(seconds=TIMEOUT))
    if processes.rank >= clients:
        raise Spare(0)
    spare = processes.size - clients
    line = f"{processes.size} processes share {clients} client{'s' if clients != 1 else ''}: {spare} have nothing to do"
    fewer = replace(processes, size=clients, group=group) if clients > 1 else ALONE
    return replace(workload, processes=fewer, notes=(*workload.notes, line))


def leave() -> None:
    """The run is over."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def speaks(error: BaseException) -> bool:
    """Whether this process is to say why a run ends: one line, and not one from each. The first who asks is, and the
    others let the first process ask first."""
    if launched() == 1:
        return True
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once one has ended: this one is about to
    first = os.environ["RANK"] == "0"
    try:
        for wait in (0.0, 0.0 if first else LATER):
            time.sleep(wait)
            socket.create_connection(place(), LATER).close()
        return bool((_stores[0] if _stores else meeting_place()).add("said", 1) == 1)
    except (OSError, RuntimeError):
        # Who kept the count is gone: unless it was killed, it has spoken. Before they met, there may be none yet.
        return type(error).__name__ == "ProcessLost" if _stores else first


def place() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def meeting_place() -> Any:
    """Where the processes are to meet, for one that does not come: torchrun keeps it, on whichever machine."""
    import torch.distributed as dist

    return dist.PrefixStore(
        "pf2lora", dist.TCPStore(*place(), is_master=False, timeout=timedelta(seconds=LATER))
    )


def command_prefix() -> str:
    """What stands before `pf2lora` in the command that goes on with this run."""
    if launched() == 1:
        return ""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return f"torchrun --nproc-per-node {here} -m " if here == str(launched()) else "torchrun … -m "
