"""What checkpoints cost: their share of a run's time at the defaults, and one of a thousand clients.

    python benchmarks/checkpoint_cost.py [--clients 1000] [--seconds 120]

The run is the demo's model and texts (`pf2lora[demo]`) with PF2LoRA and the default settings, long enough for some.
The thousand clients are adapters of that model, without training: what is timed is one save, and one reading.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pf2lora.cli.demo import demo_config
from pf2lora.core.method import over_tensors, tensors_of
from pf2lora.engines.local import After, Round, StepStats
from pf2lora.run import api, snapshot, trial_state
from pf2lora.run.checkpoints import Checkpoints
from pf2lora.run.comparison import prepare
from pf2lora.run.config import Config, TrainingSettings
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.trial import common_vectors
from pf2lora.run.watched import Watched


def config_of(rounds: int) -> Config:
    """The default training on the demo's clients."""
    demo = demo_config()
    training = replace(TrainingSettings(), rounds=rounds, method=("pf2lora",))
    return replace(demo, training=training, output=replace(demo.output, title=""))


def share_of_a_run(seconds: float) -> None:
    """Saves of a run of about so many seconds, against the time it took."""
    spent: list[float] = []
    original, fingerprinted = Checkpoints.save, Checkpoints.__init__

    def timed(function: Any) -> Any:
        def wrapper(*args: Any, **rest: Any) -> Any:
            started = time.perf_counter()
            found = function(*args, **rest)
            spent.append(time.perf_counter() - started)
            return found

        return wrapper

    def seconds_of(config: Config, out: Path) -> float:
        """Of a run whose clients are loaded."""
        began: list[float] = []
        api.run(config, out, on_workload=lambda workload: began.append(time.perf_counter()))
        return time.perf_counter() - began[0]

    with tempfile.TemporaryDirectory() as folder:
        per_round = seconds_of(config_of(2), Path(folder) / "run") / 2
        rounds = max(4, round(seconds / per_round))
        with (
            patch.object(Checkpoints, "save", timed(original)),
            patch.object(Checkpoints, "__init__", timed(fingerprinted)),
        ):
            total = seconds_of(config_of(rounds), Path(folder) / "long")
    print(
        f"a run of {rounds} rounds, {total:.1f} s: {len(spent) - 1} checkpoints and the fingerprint took "
        f"{sum(spent):.2f} s, {100 * sum(spent) / total:.2f}% of it"
    )


def many_clients(count: int) -> None:
    """One save and one reading of `count` clients with adapters of the demo's model."""
    config = config_of(2)
    trial = enlarged(set_up(prepare(config), "pf2lora", 0), count)
    after = After(1, (10,) * count, (1.0,) * count)
    nothing = StepStats(torch.zeros(1, count))
    common = trial.state.x[:1, : trial.method.layout.shared]
    done = Round(1, list(range(count)), nothing, trial.state, trial.state, common, 1.0, after=after)
    watched = Watched.of(replace(trial, workload=replace(trial.workload, validation=None)))
    bytes_of_state = sum(t.nbytes for t in tensors_of(trial.state))
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        about = {"trial": trial_state.summary(trial, done, watched)}
        files = trial_state.files(trial, done, watched, common_vectors(trial, done), [""] * count)
        place = snapshot.write(Path(folder), about, files, 2)
        written = time.perf_counter() - started
        size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
        started = time.perf_counter()
        snapshot.opened(place)
        read = time.perf_counter() - started
    print(
        f"{count} clients, {bytes_of_state / 1e6:.0f} MB of state: a checkpoint has {size / 1e6:.0f} MB, is written "
        f"in {written:.2f} s and checked in {read:.2f} s: at 2% of the time, one every {written / 0.02:.0f} s"
    )


def enlarged(trial: Trial, count: int) -> Trial:
    """The trial with so many clients, who are the first one again and again."""
    state = over_tensors(lambda t: t[:1].expand(count, *t.shape[1:]).clone(), trial.state)
    names = [f"client-{k}" for k in range(count)]
    return replace(trial, state=state, source=replace(trial.source, clients=names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120)
    given = parser.parse_args()
    many_clients(given.clients)
    share_of_a_run(given.seconds)
