"""What the federation's engine costs per round beyond the local steps, and what the wire precision does.

    python benchmarks/federation_overhead.py [--wire bfloat16]     # 4 sites, two layers of width 768, rank 32
    python benchmarks/federation_overhead.py --method homlora --width 2048 --rank 1024 --rounds 8 --steps 1  # x: 67 MB

The overhead of a round is its time on the server minus the longest time a site spent inside its session (local steps,
evaluation, saving its state). Sites write that time to their own log. Memory is the highest of the server's processes:
FLARE's main one, and that of the job, in which the server's session is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import psutil
from flare_federation import flare
from small_federation import LABELS, SITES, write_data, write_model

from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.run.config import from_settings

TIMED = """
import sys
if "worker_process" in " ".join(sys.orig_argv):
    import json, os, time
    from pf2lora.federation.protocol import site
    answer = site.SiteSession.answer

    def timed(self, request):
        began = time.perf_counter()
        reply = answer(self, request)
        with open(os.environ["TIMES"], "a") as file:
            file.write(json.dumps([request.round, time.perf_counter() - began]) + "\\n")
        return reply

    site.SiteSession.answer = timed
"""


class Memory:
    """The highest memory of a process and of those that it started, in MB. To be looked at while they are there."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.highest: dict[int, float] = {}

    def look(self) -> None:
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(OSError, StopIteration):  # it may end meanwhile
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                peak = next(line for line in lines if line.startswith("VmHWM:"))
                self.highest[process.pid] = int(peak.split()[1]) * 1024 / 1e6

    def figures(self) -> dict[str, float]:
        jobs = [most for pid, most in self.highest.items() if pid != self.process.pid]
        return {"server_main_MB": self.highest[self.process.pid], "server_job_MB": max(jobs)}


def measure(root: Path, plan: Plan) -> dict[str, float]:
    """Run the plan and take its times apart."""
    (root / "timed").mkdir(parents=True)
    (root / "timed" / "sitecustomize.py").write_text(TIMED)
    with flare(root, plan) as run:
        for site in plan.sites:
            run.environment[site] = {"PYTHONPATH": str(root / "timed"), "TIMES": str(root / f"{site}.times")}
        began = time.perf_counter()
        run.start("server")
        run.start(*plan.sites)
        connected = time.perf_counter() - began
        run.submit()
        run.wait(lambda: run.round() >= 1, 600, "the first round")
        first = time.perf_counter() - began
        memory = Memory(run.started["server"].pid)

        def over() -> bool:
            memory.look()
            assert run.state() not in ("failed", "stopped"), run.said()[-1]
            return run.state() == "finished"

        run.wait(over, 3600, "the end")
    session = ServerSession(plan, run.run)
    inside: dict[int, float] = {}
    for site in plan.sites:
        for line in (root / f"{site}.times").read_text().splitlines():
            number, seconds = json.loads(line)
            inside[number] = max(inside.get(number, 0.0), seconds)
    records = list(session.records)
    rounds = [(r["seconds"], inside[r["round"]]) for r in records[1:]]  # the first warms up
    assert session.common is not None
    return {
        "numbers": session.common.numel(),
        "bytes_per_site_and_round": statistics.mean(records[-1]["bytes"].values()),
        "seconds_until_connected": connected,
        "seconds_until_first_round": first,
        "round": statistics.median(r for r, _ in rounds),
        "site": statistics.median(s for _, s in rounds),
        "overhead_median": statistics.median(r - s for r, s in rounds),
        "overhead_worst": max(r - s for r, s in rounds),
    } | memory.figures()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--method", default="pf2lora")
    args = parser.parse_args()
    settings = {
        "rounds": args.rounds,
        "steps": args.steps,
        "batch_size": 4,
        "rank": args.rank,
        "client_rank": 2,
        "evaluate_every": args.rounds,
        "method": [args.method],
    }
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_model(root / "model", width=args.width)
        write_data(root)
        config = from_settings(settings, "benchmark")
        plan = Plan.of(config, "benchmark", SITES, LABELS, deadline=300, wire=args.wire)
        found = measure(root, plan)
    print(
        f"{len(SITES)} sites on {os.cpu_count()} cores, {args.rounds} rounds of {args.steps} steps, x as {args.wire}"
    )
    for name, value in found.items():
        print(f"  {name:28s} {value:,.3f}" if value < 1000 else f"  {name:28s} {value:,.0f}")


if __name__ == "__main__":
    main()
