"""`make fuzz`: broken files without end into everything that reads one; nothing but a refusal in one line may come out.

    python tests/helpers/fuzz.py --inputs 100000            # two processes, a line of progress now and then
    python tests/helpers/fuzz.py --target config --input 17 # one input again; --show prints it

An input may be taken or refused. A finding is any other exception, more than a line, over 10 seconds, over 1 GiB of
memory, or a file that was touched; it is printed with the command that repeats it, and its bytes are kept.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from fuzz_targets import TARGETS, Target

from pf2lora.errors import UserError, one_line

SECONDS, MEMORY = 10, 2**30
STALLED = 30  # seconds without a finished input: it hangs where no signal reaches it
KEPT = Path("build/fuzz")


@dataclass(frozen=True)
class Finding:
    """What came out of an input that should not."""

    target: str
    number: int
    what: str

    @property
    def again(self) -> str:
        return f"python tests/helpers/fuzz.py --target {self.target} --input {self.number}"


class TooSlow(BaseException):
    """No code of ours catches it."""


def numbered(i: int) -> tuple[str, int]:
    """The target of input `i` of all, and its number there: targets take turns, each as often as its weight."""
    turns = [(name, turn) for name, target in TARGETS.items() for turn in range(target.weight)]
    name, turn = turns[i % len(turns)]
    return name, i // len(turns) * TARGETS[name].weight + turn


_seeds: dict[str, list[bytes]] = {}


def make_input(name: str, number: int) -> bytes:
    """Input `number` of a target, the same ever after."""
    target = TARGETS[name]
    seeds = _seeds.setdefault(name, target.seeds())
    random = Random(f"{name} {number}")
    seed = seeds[number % len(seeds)]
    return random.choice(target.mutations)(seed, random)


def try_input(name: str, number: int, folder: Path) -> Finding | None:
    """Read one input in an empty folder; a finding, if it is one."""
    target, data = TARGETS[name], make_input(name, number)
    file = folder / "input" / target.file
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    before = listed(folder / "input")
    try:
        what = outcome(target, file)
        touched = listed(folder / "input") != before or file.read_bytes() != data
    finally:
        shutil.rmtree(folder / "input", ignore_errors=True)
    what = what or ("it touched a file" if touched else "")
    return Finding(name, number, what) if what else None


def outcome(target: Target, file: Path) -> str:
    """What is wrong with how the file was read; nothing where it was taken or refused."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with time_limit(SECONDS):
            target.read(file)
    except target.refusals as error:
        line = one_line(error)
        if not line.strip() or len(line) > 2000:
            return f"a refusal of {len(line)} characters: {line[:100]}"
    except TooSlow:
        return f"more than {SECONDS} seconds"
    except Exception:
        return traceback.format_exc(limit=-6)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    return f"{grown / MEMORY:.1f} GiB of memory" if grown > MEMORY else ""


def listed(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_mtime_ns) for p in folder.rglob("*"))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(signal: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def work(first: int, inputs: int, step: int, now: Synchronized[int], out: Any) -> None:
    """One process: every `step`-th input from `first` on, with a limit of memory beside what is loaded already."""
    quiet()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 2 * MEMORY  # address space, of which more is taken than used
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        for i in range(first, inputs, step):
            finding = try_input(*numbered(i), Path(folder))
            if finding is not None:
                out.put(finding)
            now.value = i
    out.put(None)


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)


def run(inputs: int, workers: int) -> list[Finding]:
    """All inputs, with a line of progress; a process that hangs is ended, named and replaced."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    nows = [context.Value("q", k - workers) for k in range(workers)]
    started = time.monotonic()

    def start(k: int, first: int) -> Any:
        process = context.Process(target=work, args=(first, inputs, workers, nows[k], out))
        process.start()
        return process

    processes = [start(k, k) for k in range(workers)]
    moved = [(now.value, time.monotonic()) for now in nows]
    found: list[Finding] = []
    left, told = workers, started
    while left:
        try:
            finding = out.get(timeout=1)
            left -= finding is None
            if finding is not None:
                found.append(finding)
                keep(finding)
        except Exception:  # nothing in this second
            pass
        for k, process in enumerate(processes):
            value, since = moved[k]
            if nows[k].value != value:
                moved[k] = nows[k].value, time.monotonic()
            elif time.monotonic() - since > STALLED or (process.exitcode not in (None, 0)):
                stuck = value + workers
                process.kill()
                process.join()
                why = f"it hangs, or the process died ({process.exitcode})"
                found.append(Finding(*numbered(stuck), why))
                keep(found[-1])
                nows[k].value = stuck
                processes[k], moved[k] = start(k, stuck + workers), (stuck, time.monotonic())
        if time.monotonic() - told > 10:
            told = time.monotonic()
            done = sum(max(now.value, 0) for now in nows) // workers
            print(f"{done} of {inputs} inputs, {len(found)} findings, {told - started:.0f} s", flush=True)
    print(
        f"{inputs} inputs for {len(TARGETS)} readers, {len(found)} findings, {time.monotonic() - started:.0f} s"
    )
    return found


def keep(finding: Finding) -> None:
    """The input's bytes, and how to repeat it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    file = KEPT / f"{finding.target}-{finding.number}"
    file.write_bytes(make_input(finding.target, finding.number))
    print(f"FINDING {finding.again} ({file})\n{finding.what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--input", type=int, help="with --target: one input")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    quiet()
    if given.input is None:
        sys.exit(1 if run(given.inputs, given.workers) else 0)
    if given.show:
        print(make_input(given.target, given.input))
    with tempfile.TemporaryDirectory() as folder:
        finding = try_input(given.target, given.input, Path(folder))
    print(finding.what if finding else "taken or refused")
    sys.exit(1 if finding else 0)


def refusal(name: str, number: int, folder: Path) -> UserError | None:
    """The error that refuses an input; None where it is taken."""
    file = folder / TARGETS[name].file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(make_input(name, number))
    try:
        TARGETS[name].read(file)
    except UserError as error:
        return error
    return None


if __name__ == "__main__":
    main()
