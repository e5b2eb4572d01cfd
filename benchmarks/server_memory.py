"""The server's memory and time against the size of x and the number of sites, in one process for the server alone.

    python benchmarks/server_memory.py --sites 4 16 64 --numbers 4000000
    python benchmarks/server_memory.py --sites 4 --numbers 100000 --rounds 1000       # does memory stay flat?

A stand-in for the transport: a round's answers are made by a child and handed to the server's session one by one, as
FLARE hands them over, so that memory and CPU seconds are the session's alone: reading, checks, merge and checkpoint.
What FLARE needs beside it: `federation_overhead.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch

from pf2lora.core.layout import Entry, Layout
from pf2lora.federation.flare.processes import ENGINE
from pf2lora.federation.protocol.messages import describe, encode, to_tensors
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.records import RECORDS
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.wire import Wire
from pf2lora.run.config import from_settings

MB = 1e6
RANK = 16


def layout_of(numbers: int) -> Layout:
    """Adapters of rank 16 with about so many numbers."""
    width = max(16, numbers // (2 * RANK * 4))
    entries = [
        Entry(f"layer-{i}", kind, shape)  # type: ignore[arg-type]
        for i in range(4)
        for kind, shape in (("A", (RANK, width)), ("B", (width, RANK)))
    ]
    return Layout.of(entries)


def resident(peak: bool = False) -> float:
    """This process's memory in MB, now or at its highest."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith(field))


def apart(work: Callable[[str], bytes], files: dict[str, Path]) -> None:
    """Write the sites' files in another process: what a site does is none of the server's memory and time."""
    child = os.fork()
    if child == 0:
        for name, file in files.items():
            file.write_bytes(work(name))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def message(session: ServerSession, coder: Wire, number: int, name: str) -> bytes:
    """A site's update, at random around what it was served."""
    coming, layout = session.coming(), session.layout
    whole = torch.ones(layout.size) if coming is None else coming.whole
    served = {} if coming is None else to_tensors(layout, whole, None, torch.float32)
    draw = torch.Generator().manual_seed(1000 * number + session.plan.sites.index(name))
    sent = whole + 0.01 * torch.randn(layout.size, generator=draw)
    tensors, _ = coder.update(session.known_method, number, sent, None, served, {})
    return encode({"kind": "update", "round": number, "steps": 2, "loss": 1.0}, tensors)


def measure(sites: int, numbers: int, rounds: int, wire: str, merge: str) -> dict[str, Any]:
    """Rounds of a session whose sites answer at random around x."""
    names, layout = tuple(f"site-{k:03d}" for k in range(sites)), layout_of(numbers)
    settings = {"method": ["homlora"], "rounds": rounds, "steps": 2, "batch_size": 4}
    plan = Plan.of(from_settings(settings), "memory", names, ("neg", "pos"), wire=wire, merge=merge)
    facts = {
        "model": "0" * 64,
        "labels": "0" * 64,
        "label_count": 2,
        "train_rows": 100,
        "test_rows": 0,
        "layout": describe(layout),
        "engine": "2.9.0",
        "version": "0.1.0",
    }
    coder = Wire.of(plan)
    with tempfile.TemporaryDirectory() as scratch:
        session = ServerSession(plan, Path(scratch))
        for name in names:
            session.register(name, encode({"kind": "hello", "round": 1} | facts))
        before, seconds, after = resident(), list[float](), list[float]()
        for number in range(1, rounds + 1):
            began = time.process_time()
            requests = session.requests(list(names), set())
            spent = time.process_time() - began
            assert len({id(data) for data in requests.values()}) <= 2  # sites share what they are told
            answers = {}
            files = {name: Path(scratch) / f"{name}.message" for name in names}
            apart(partial(message, session, coder, number), files)
            for name in names:
                data = files[name].read_bytes()
                began = time.process_time()
                answers[name] = session.arrived(name, data)
                spent += time.process_time() - began
                del data
            del requests  # which the transport holds until all have answered
            began = time.process_time()
            session.finish_round(answers, 0.0, [])
            seconds.append(spent + time.process_time() - began)
            after.append(resident())
        gc.collect()
        size = 4 * layout.size / MB
        found = {
            "sites": sites,
            "x MB": round(size, 1),
            "peak MB": round(resident(peak=True) - before),
            "peak / x": round((resident(peak=True) - before) / size, 1),
            "CPU seconds a round": round(statistics.median(seconds), 2),
        }
        records = Path(scratch) / RECORDS
        found["bytes recorded of a site and round"] = round(records.stat().st_size / (rounds * sites))
        if rounds >= 100:
            found |= {f"MB after round {n}": round(after[n - 1] - before) for n in (10, rounds // 2, rounds)}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--numbers", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--merge", default="mean")
    args = parser.parse_args()
    if len(args.sites) > 1:
        for sites in args.sites:
            own = ["--sites", str(sites), "--numbers", str(args.numbers), "--rounds", str(args.rounds)]
            own += ["--wire", args.wire, "--merge", args.merge]
            subprocess.run([sys.executable, __file__, *own], check=True, env=os.environ | ENGINE)
        return
    torch.set_num_threads(1)
    print(json.dumps(measure(args.sites[0], args.numbers, args.rounds, args.wire, args.merge)), flush=True)


if __name__ == "__main__":
    main()
