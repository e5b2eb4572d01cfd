"""Long runs of many clients: memory and open files stay flat, and the run folder is as large as docs/result.md says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from little_world import FAST, sentences, write_jsonl, write_model
from result_example import make_result

import pf2lora
from pf2lora.atomic import write_json
from pf2lora.report import render
from pf2lora.run import folder
from pf2lora.run.result import Result, RoundRecord, from_json, load_result
from pf2lora.run.thinning import LEAST_ROUNDS, MOST_NUMBERS, most_rounds, thinned

PER_NUMBER = 24  # bytes of a number in metrics.jsonl, about: sixteen digits, and what parts it from the next


def resident() -> int:
    """This process's memory, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Gauge:
    """Memory and open files after every round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory: list[int] = []
        self.files: list[int] = []
        append = folder.append_metrics

        def watched(*args: Any) -> None:
            append(*args)
            self.memory.append(resident())
            self.files.append(len(os.listdir("/proc/self/fd")))

        monkeypatch.setattr(folder, "append_metrics", watched)

    def check(self, warm_up: int) -> None:
        """Flat after so many rounds: the mean of the last tenth is at most 5% above that of the tenth after them."""
        part = max(1, (len(self.memory) - warm_up) // 10)
        first, last = self.memory[warm_up : warm_up + part], self.memory[-part:]
        growth = sum(last) / sum(first) - 1
        print(f"memory after warm-up {sum(first) / part / 1e6:.0f} MB, at the end {growth:+.1%}")
        assert growth <= 0.05
        assert max(self.files[warm_up:]) <= self.files[warm_up]


def long_run(tmp_path: Path, clients: int, rounds: int) -> Result:
    files = [
        str(write_jsonl(tmp_path / "data" / f"client-{k}.jsonl", sentences(6, k))) for k in range(clients)
    ]
    model = write_model(tmp_path / "model")
    settings = FAST | {"rounds": rounds, "steps": 1, "batch_size": 2, "rank": 2, "client_rank": 1}
    return pf2lora.federate(**settings, model=model, clients=files, out=tmp_path / "run")


def check_folder(run: Path, clients: int, rounds: int) -> None:
    """As docs/result.md says: two numbers for each client and round in metrics.jsonl, and nothing that grows else."""
    size = (run / "metrics.jsonl").stat().st_size
    measured = 10  # rounds, each with some 12 numbers more for each client
    assert size <= PER_NUMBER * clients * (2 * rounds + 12 * measured) + 500 * rounds
    adapters = sum(p.stat().st_size for p in run.rglob("*.safetensors"))
    assert adapters <= (clients + 1) * 60_000  # this model's: the PEFT folder and the state of each client
    assert not list(run.glob("checkpoints/*"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_run_s_memory_and_open_files_do_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    gauge = Gauge(monkeypatch)
    long_run(tmp_path, 10, 60)
    gauge.check(20)
    check_folder(tmp_path / "run", 10, 60)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_200_clients_for_500_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    gauge, started = Gauge(monkeypatch), time.monotonic()
    long_run(tmp_path, 200, 500)
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "run").iterdir() if p.is_file()}
    print(f"{time.monotonic() - started:.0f} s; {sizes}")
    gauge.check(100)
    check_folder(tmp_path / "run", 200, 500)


# ---- what result.json keeps ----


def records(count: int, clients: int, every: int) -> Iterator[RoundRecord]:
    for number in range(1, count + 1):
        record = RoundRecord(number, 1.0, [0.5] * clients)
        yield replace(record, served={"accuracy": [0.5] * clients}) if number % every == 0 else record


def kept(count: int, clients: int, every: int) -> list[RoundRecord]:
    rounds: list[RoundRecord] = []
    for record in records(count, clients, every):
        rounds.append(record)
        rounds = thinned(rounds, clients)
        assert len(rounds) <= most_rounds(clients) and rounds[-1] is record
    return rounds


def test_a_run_that_is_not_large_keeps_every_round() -> None:
    assert [r.round for r in kept(500, 200, 50)] == [*range(1, 501)]
    assert most_rounds(10**9) == LEAST_ROUNDS


@pytest.mark.parametrize(("clients", "every"), [(1000, 1000), (1000, 1), (2000, 7), (10**6, 10)])
def test_a_large_run_keeps_rounds_evenly(clients: int, every: int) -> None:
    most = most_rounds(clients)
    rounds: list[RoundRecord] = []
    few = 3  # clients' numbers: how many there are is told
    for record in records(5000, few, every):
        rounds.append(record)
        rounds = thinned(rounds, clients)
        assert len(rounds) <= most
    numbers = [r.round for r in rounds]
    assert (
        numbers[0] == 1
        and numbers[-1] == 5000
        and numbers == sorted(set(numbers))
        and len(numbers) >= most // 4
    )
    gaps = [b - a for a, b in pairwise(numbers)]
    assert max(gaps) <= 2.5 * 5000 / (most // 4)
    measured = sum(r.served is not None for r in rounds)
    assert measured == 5 if every == 1000 else measured >= most // 4 - 1


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("measured", "largest"), [(10, 15e6), pytest.param(100, 80e6, marks=pytest.mark.slow)]
)
def test_10_000_rounds_of_1000_clients_stay_readable(tmp_path: Path, measured: int, largest: float) -> None:
    """As large as result.json gets, with ranks of 24 layers: measured ten times, or in every round that is kept."""
    result = from_json(make_result(clients=1000, seeds=1, rounds=2, layers=24), "example")
    name = next(iter(result.methods))
    (run,) = result.methods[name].runs
    full = next(r for r in run.rounds if r.served is not None)
    plain = RoundRecord(0, 1.0, full.train_loss, second_order_share=full.second_order_share)
    most = most_rounds(1000)
    every = most // measured
    many = [replace(full if n % every == 0 else plain, round=n) for n in range(1, most + 1)]
    result = replace(
        result, methods={name: replace(result.methods[name], runs=[replace(run, rounds=many)])}, examples=[]
    )
    started = time.monotonic()
    write_json(tmp_path / "result.json", result.to_dict())
    assert load_result(tmp_path).methods[name].runs[0].rounds[-1].round == most == MOST_NUMBERS // 1000
    page = render([result])
    size = (tmp_path / "result.json").stat().st_size
    print(
        f"result.json {size / 1e6:.0f} MB, report {len(page) / 1e6:.0f} MB, {time.monotonic() - started:.0f} s"
    )
    assert size < largest and len(page) < largest / 2
