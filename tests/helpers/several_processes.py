"""Some processes that share a run, without torchrun: forks of this one, which has imported everything already; and how
their results are compared with those of one process."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pf2lora.engines.processes import Processes, current
from pf2lora.run.result import Result, SeedRun

PATIENCE = 60  # seconds that they wait for each other


def in_processes(size: int, work: Callable[[Processes], Any]) -> list[Any]:
    """What `work` returns in each of `size` processes; an AssertionError where one of them fails."""
    codes, found = started(size, work)
    assert codes == [0] * size, f"exit codes {codes}"
    return found


def launched(size: int, work: Callable[[int], Any], *, nodes: bool = False) -> tuple[list[int], list[Any]]:
    """As torchrun starts them: `work` gets its number, and joins the others by the environment. With `nodes`, each is
    on a machine of its own, and torchrun keeps the place where they meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if nodes else None

    def in_environment(rank: int) -> Any:
        said: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": 0 if nodes else rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": 1 if nodes else size,
        }
        said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": nodes}
        os.environ.update({name: str(value) for name, value in said.items()})
        return work(rank)

    found = started(size, in_environment, met=False)
    del kept
    return found


def started(size: int, work: Callable[[Any], Any], *, met: bool = True) -> tuple[list[int], list[Any]]:
    """The exit code of each process (minus the signal that ended it), and what `work` returned there or None. It gets
    the processes, which have `met`, or else its own number."""
    with tempfile.TemporaryDirectory() as place:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                os._exit(in_one(rank, size, work, Path(place), met))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers = [Path(place) / f"answer-{rank}" for rank in range(size)]
        return codes, [pickle.loads(file.read_bytes()) if file.exists() else None for file in answers]


def in_one(rank: int, size: int, work: Callable[[Any], Any], place: Path, met: bool) -> int:
    """One of the processes: joins the others, works, and writes its answer down."""
    try:
        signal.alarm(3 * PATIENCE)
        torch.set_num_threads(1)
        if met:
            store = dist.FileStore(str(place / "store"), size)
            wait = timedelta(seconds=PATIENCE)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
        answer = work(current() if met else rank)
        (place / f"answer-{rank}").write_bytes(pickle.dumps(answer))
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        print(f"process {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        return 9
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def assert_same(found: Result, expected: Result) -> None:
    """Up to rounding, which may tip a row of the test data."""
    assert list(found.methods) == list(expected.methods) and found.clients == expected.clients
    for name, method in expected.methods.items():
        for one, other in zip(found.methods[name].runs, method.runs, strict=True):
            assert_same_run(one, other)
    for metric, untrained in expected.baselines["untrained"].scores.items():
        ours = found.baselines["untrained"].scores[metric]
        assert ours.per_client == [
            v if v is None else pytest.approx(v, rel=1e-6) for v in untrained.per_client
        ]


def assert_same_run(one: SeedRun, other: SeedRun) -> None:
    assert (one.seed, one.parameters, one.bytes_per_round) == (
        *(other.seed, other.parameters, other.bytes_per_round),
    )
    assert one.flops_per_round == pytest.approx(other.flops_per_round, rel=0.1)  # smaller passes pad less
    assert len(one.rounds) == len(other.rounds)
    for a, b in zip(one.rounds, other.rounds):
        assert (a.round, a.left_out, a.ranks) == (b.round, b.left_out, b.ranks)
        for part in ("train_loss", "validation_loss", "client_share"):
            assert getattr(a, part) == pytest.approx(getattr(b, part), abs=2e-3), part
        for metric, values in (b.served or {}).items():
            assert (a.served or {})[metric] == pytest.approx(values, abs=0.06)
    assert (one.choices is None) == (other.choices is None)
    for mine, theirs in zip(one.choices or (), other.choices or ()):
        assert mine.last_round == pytest.approx(theirs.last_round, abs=2e-3)
    assert one.resampled.keys() == other.resampled.keys()
    for point, resampled in other.resampled.items():
        assert one.resampled[point].means == pytest.approx(resampled.means, abs=0.06)
    assert (one.confusion is None) == (other.confusion is None)
