"""Run the commands of a file side by side on one accelerator, a few at a time, and stop them all in time.

    python benchmarks/in_parallel.py jobs.txt --at-once 6 --seconds 500 --logs logs

A line of the file is a shell command; `#` begins a comment. A small model leaves most of an accelerator idle while the
host prepares its next step, so several processes finish sooner together than one after the other; their times say
nothing then. (Once each fills the accelerator there is nothing to win: ten at once took as long as one by one.) At the
end of the time everything that still runs is interrupted (Ctrl-C), and killed ten seconds later: commands that write a
line per finished run lose only the one in hand. `--done FILE` lists the commands that ended well and leaves them out
the next time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple


class Job(NamedTuple):
    command: str
    process: subprocess.Popen[bytes]
    started: float


def read_commands(file: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in file.read_text(encoding="utf8").splitlines())
    return [line for line in lines if line]


def start(command: str, log: Path) -> Job:
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Job(command, process, time.monotonic())


def stop(jobs: list[Job]) -> None:
    for signal_, patience in ((signal.SIGINT, 10.0), (signal.SIGKILL, 5.0)):
        for job in jobs:
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal_)
        ends = time.monotonic() + patience
        while time.monotonic() < ends and any(job.process.poll() is None for job in jobs):
            time.sleep(0.1)


def note(command: str, done: Path | None) -> None:
    if done is not None:
        with done.open("a", encoding="utf8") as file:
            file.write(command + "\n")


def run(
    commands: list[str], *, at_once: int, seconds: float, logs: Path, done: Path | None = None
) -> list[str]:
    """The commands that did not end by themselves with status 0."""
    logs.mkdir(parents=True, exist_ok=True)
    if done is not None and done.exists():
        ended = set(done.read_text(encoding="utf8").splitlines())
        commands = [command for command in commands if command not in ended]
    ends, waiting, running, failed = time.monotonic() + seconds, list(enumerate(commands)), list[Job](), []
    while (waiting or running) and time.monotonic() < ends:
        while waiting and len(running) < at_once:
            number, command = waiting.pop(0)
            running.append(start(command, logs / f"{number:02}.log"))
        time.sleep(0.1)
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            print(
                f"{job.process.returncode} {time.monotonic() - job.started:6.1f} s  {job.command}", flush=True
            )
            if job.process.returncode:
                failed.append(job.command)
            else:
                note(job.command, done)
    stop(running)
    for job in running:
        print(f"stopped  {job.command}")
    for _, command in waiting:
        print(f"not run  {command}")
    return [*failed, *(job.command for job in running), *(command for _, command in waiting)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--logs", type=Path, default=Path("build/logs"))
    parser.add_argument("--done", type=Path)
    options = parser.parse_args(arguments)
    limits = {"at_once": options.at_once, "seconds": options.seconds}
    return int(bool(run(read_commands(options.file), **limits, logs=options.logs, done=options.done)))


if __name__ == "__main__":
    raise SystemExit(main())
