"""Milliseconds of one local step of all clients, beside the plain way to do it: `python benchmarks/step_time.py`.

(a) the plain way is a PEFT model with two active adapters, clients one by one, exact double backward on eager
    attention as in the paper's pseudocode, AdamW of torch; HOMLoRA, and PF2LoRA without the second-order term, on sdpa
    attention (`plain_peft.py`). bfloat16 is a bfloat16 base model with float32 adapters, as PEFT does by itself.
    A few clients are timed (`plain_clients_timed`) and multiplied: it is client by client.
(b) is this project. `difference` computes the same hypergradient as `exact`, so both stand beside the exact plain way.

First, both make the same steps from the same start in float32, and the largest difference of a loss is reported.
Then each is timed on batches that are drawn beforehand, float32 with tf32 products on CUDA. Where texts have varied
lengths (`--minilm`), both sides see the same rows: the plain way in their shuffled order, this project with rows of
like length together, as in training. The share is that of the
machine's product of two large square matrices, counting only necessary arithmetic (`shapes.py`: `necessary_flops`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from plain_peft import PlainClient, PlainLoop
from shapes import DTYPES, SHAPES, Workload, necessary_flops
from timing import ceiling, float32_products, machine, milliseconds, peak_gb, start_memory, versions
from torch import Tensor

from pf2lora.adapters import TwoLevelModel
from pf2lora.data.batches import Batch
from pf2lora.engines.stepper import make_stepper
from pf2lora.method import Loss, Method, Report, State
from pf2lora.methods import METHODS
from pf2lora.trial import WINDOW

LR, CLIENT_LR, WEIGHT_DECAY = 1e-3, 0.03, 0.01
CHECKED_CLIENTS, CHECKED_STEPS = 2, 3
HYPERGRADIENTS = ("difference", "exact", "none")
Step = Callable[..., tuple[State, Report]]


class Way(NamedTuple):
    """A method and how it gets its hypergradient; HOMLoRA has none."""

    method: str
    hypergradient: str | None

    @property
    def two_level(self) -> bool:
        return self.method == "pf2lora"

    @property
    def draws(self) -> int:
        return 2 if self.two_level else 1

    @property
    def plain(self) -> Way:
        """What the plain way does for it: nobody would write `difference` by hand."""
        return Way(self.method, "exact") if self.hypergradient == "difference" else self


class Case(NamedTuple):
    """What one row is about."""

    model: str
    clients: int
    precision: str
    way: Way


class Timed(NamedTuple):
    ms: float  # ours: of all clients; plain: of one
    peak: float | None
    clients: int  # in one pass, or timed one by one
    flops: float = 0.0  # necessary, of all clients


@dataclass
class Row:
    """One case. `ratio` is plain_ms / ours_ms; memory is the device's, the base model included; None: not measured."""

    model: str
    clients: int
    batch: int
    length: int
    precision: str
    method: str
    hypergradient: str | None
    plain_ms: float | None
    ours_ms: float
    ratio: float | None
    peak_gb: float | None
    ceiling_share: float
    max_loss_difference: float | None
    plain_peak_gb: float | None
    plain_clients_timed: int
    clients_per_pass: int
    ceiling_tflops: float
    machine: str
    versions: str


def build_method(way: Way, model: TwoLevelModel) -> Method:
    options: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    if way.two_level:
        options |= {"client_lr": CLIENT_LR, "hypergradient": way.hypergradient}
    return METHODS[way.method](model.x, **options)


def our_step(method: Method, F: Loss, device: torch.device) -> Step:
    """This project's step, `(state, *batches) -> (state, report)`."""

    stepper = make_stepper(F, device)
    return lambda state, *batches: stepper(method, state, batches)


def plain_clients(
    work: Workload, way: Way, count: int, *, masked: bool = False
) -> tuple[PlainLoop, list[PlainClient]]:
    """The PEFT loop on the attention that the way needs, and its first clients."""
    described = work.adapt(two_level=way.two_level)
    x, y = work.start(described, count)
    loop = PlainLoop(described, lr=LR, client_lr=CLIENT_LR, weight_decay=WEIGHT_DECAY, masked=masked)
    work.base.set_attn_implementation("eager" if way.hypergradient == "exact" else "sdpa")
    return loop, [loop.client(x[k], y[k]) for k in range(count)]


def end_plain(work: Workload, loop: PlainLoop) -> None:
    loop.remove()
    work.base.set_attn_implementation("sdpa")


def plain_step(loop: PlainLoop, way: Way, client: PlainClient) -> Callable[..., Tensor]:
    """The client's step, `(*batches) -> loss`, with its parameters in place."""
    loop.turn_of(client)
    if not way.two_level:
        return lambda batch: loop.homlora(client, batch)
    second_order = way.hypergradient != "none"
    return lambda inner, outer: loop.pf2lora(client, inner, outer, second_order=second_order)


def plain_batches(
    work: Workload, client: int, step: int, draws: int, *, window: int = 1
) -> list[dict[str, Tensor]]:
    """The client's rows in their shuffled order, padded to its own longest, as a user's loader and collator do."""
    own = replace(work.source, data=replace(work.source.data, multiple=1), window=window)
    return [own.draw([client], [step * draws + d]).tensors for d in range(draws)]


def plain_losses(work: Workload, way: Way) -> Tensor:
    """The losses (steps, clients) of the plain way's first steps."""
    loop, clients = plain_clients(work, way, CHECKED_CLIENTS, masked=True)
    losses = []
    for k, client in enumerate(clients):
        step = plain_step(loop, way, client)
        same = [plain_batches(work, k, i, way.draws, window=work.source.window) for i in range(CHECKED_STEPS)]
        of_client = [step(*batches) for batches in same]
        losses.append(torch.stack(of_client))
    end_plain(work, loop)
    return torch.stack(losses, dim=1)


def our_losses(work: Workload, way: Way) -> Tensor:
    """The losses (steps, clients) of this project's first steps."""
    model = work.adapt(two_level=way.two_level)
    method = build_method(way, model)
    state = method.init(*work.start(model, CHECKED_CLIENTS))
    step = our_step(method, work.loss(model), work.device)
    losses = []
    for i in range(CHECKED_STEPS):
        state, report = step(state, *work.batches(list(range(CHECKED_CLIENTS)), i, way.draws))
        losses.append(report.loss.clone())
    model.remove()
    return torch.stack(losses)


def loss_differences(work: Workload, ways: list[Way]) -> dict[Way, float]:
    """The largest difference of a loss between the plain way and this project, from the same start, in float32."""
    with float32_products("highest"):
        plain = {way: plain_losses(work, way) for way in dict.fromkeys(way.plain for way in ways)}
        return {way: float((plain[way.plain] - our_losses(work, way)).abs().max()) for way in ways}


def time_plain(work: Workload, way: Way, count: int, options: argparse.Namespace) -> Timed:
    """The plain way's step of one client, the mean of `count`; putting parameters in place is not counted."""
    start_memory(work.device)
    loop, clients = plain_clients(work, way, count)

    def of_client(k: int) -> float:
        step = plain_step(loop, way, clients[k])
        sets = [plain_batches(work, k, i, way.draws) for i in range(options.sets)]
        run = lambda: [step(*batches) for batches in sets]  # noqa: E731
        whole = milliseconds(run, work.device, options.repeat, warm_up=lambda: step(*sets[0]))
        return whole / len(sets)

    ms = statistics.mean(of_client(k) for k in range(count))
    peak = peak_gb(work.device)
    end_plain(work, loop)
    return Timed(ms, peak, count)


def time_ours(work: Workload, way: Way, clients: int, options: argparse.Namespace) -> Timed:
    """This project's step of `clients` in one pass."""
    start_memory(work.device)
    model = work.adapt(two_level=way.two_level)
    if options.compile:
        torch.compiler.reset()
        model.compile()
    try:
        method = build_method(way, model)
        state = method.init(*work.start(model, clients))
        step = our_step(method, work.loss(model), work.device)
        sets = [work.batches(list(range(clients)), i, way.draws) for i in range(options.sets)]

        def run(batches_of_steps: list[list[Batch]] = sets) -> None:
            nonlocal state
            for batches in batches_of_steps:
                state, _ = step(state, *batches)

        warm_up = None if work.device.type == "cuda" else lambda: run(sets[:1])
        ms = milliseconds(run, work.device, options.repeat, warm_up=warm_up) / len(sets)
        flops = necessary_flops(model, [b for batches in sets for b in batches], way.hypergradient)
        return Timed(ms, peak_gb(work.device), clients, flops)
    finally:
        model.remove()


def time_passes(work: Workload, way: Way, clients: int, options: argparse.Namespace) -> Timed:
    """All clients in one pass if they fit into memory, else in equal passes (`clients_per_pass`), one of them timed."""
    per_pass = min(clients, options.clients_per_pass or clients)
    while True:
        try:
            timed = time_ours(work, way, per_pass, options)
            passes = clients / per_pass
            return timed._replace(ms=timed.ms * passes, flops=timed.flops * passes)
        except torch.OutOfMemoryError:
            if per_pass == 1:
                raise
        per_pass //= 2


class Measurement:
    """One run of the benchmark: its rows so far, and what the budget left out."""

    def __init__(self, options: argparse.Namespace) -> None:
        on_cpu = options.small or options.minilm or not torch.cuda.is_available()
        self.options, self.device = options, torch.device("cpu" if on_cpu else "cuda")
        self.started = time.perf_counter()
        self.rates: dict[str, float] = {}
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        pairs = [
            (m, h) for m in options.methods for h in (options.hypergradients if m == "pf2lora" else [None])
        ]
        self.ways = [Way(method, hypergradient) for method, hypergradient in pairs]

    def over(self, *what: object) -> bool:
        """Whether the budget is spent; what is not started then is named at the end."""
        if time.perf_counter() - self.started > self.options.budget:
            self.skipped.append(" ".join(str(w) for w in what if w is not None))
        return bool(self.skipped)

    def model(self, name: str) -> None:
        """The cases of one model: the check in float32, then every precision."""
        if self.over(name):
            return
        shape, options = SHAPES[name], self.options
        rows = shape.batch * 2 * max(options.sets, CHECKED_STEPS)
        work = Workload(shape, max(*options.clients, CHECKED_CLIENTS), self.device, rows=rows)
        differences = {} if options.skip_plain else loss_differences(work, self.ways)
        for precision in sorted(options.precisions, key=list(DTYPES).index):  # float32 first: no way back
            work.base.to(DTYPES[precision])  # type: ignore[arg-type]
            if precision not in self.rates:
                self.rates[precision] = ceiling(DTYPES[precision], self.device)
            plain: dict[tuple[Way, int], Timed] = {}
            for way in self.ways:
                for clients in options.clients:
                    if self.over(name, precision, *way, f"M={clients}"):
                        continue
                    key = way.plain, min(clients, options.plain_clients)
                    if not options.skip_plain and key not in plain:
                        plain[key] = time_plain(work, *key, options)
                    ours = time_passes(work, way, clients, options)
                    self.add(Case(name, clients, precision, way), plain.get(key), ours, differences.get(way))

    def add(self, case: Case, plain: Timed | None, ours: Timed, difference: float | None) -> None:
        rate, plain_ms = self.rates[case.precision], plain.ms * case.clients if plain else None
        row = Row(
            model=case.model,
            clients=case.clients,
            batch=SHAPES[case.model].batch,
            length=SHAPES[case.model].length,
            precision=case.precision,
            method=case.way.method,
            hypergradient=case.way.hypergradient,
            plain_ms=plain_ms,
            ours_ms=ours.ms,
            ratio=plain_ms / ours.ms if plain_ms else None,
            peak_gb=ours.peak,
            ceiling_share=ours.flops / (ours.ms / 1000) / rate,
            max_loss_difference=difference,
            plain_peak_gb=plain.peak if plain else None,
            plain_clients_timed=plain.clients if plain else 0,
            clients_per_pass=ours.clients,
            ceiling_tflops=rate / 1e12,
            machine=machine(self.device),
            versions=versions("torch", "transformers", "peft"),
        )
        self.rows.append(row)
        print(line(row), flush=True)
        if self.options.json:  # after every case: a run that is cut short keeps what it has
            self.options.json.write_text(json.dumps([asdict(r) for r in self.rows], indent=1) + "\n")

    def close(self) -> None:
        if self.rows:
            rates = [f"{rate / 1e12:.3g} TFLOP/s in {precision}" for precision, rate in self.rates.items()]
            print(f"{self.rows[0].machine}; {self.rows[0].versions}; square products at {', '.join(rates)}")
        for case in self.skipped:
            print(f"skipped, the budget of {self.options.budget:g} s is spent: {case}")


HEADER = (
    f"{'model':14}{'M':>5} {'precision':10}{'method':9}{'hypergradient':14}{'plain ms':>10}{'ours ms':>10}{'ratio':>7}"
    f"{'peak GB':>9}{'share':>7}{'loss diff':>11}"
)


def line(row: Row) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    passes = f"  in passes of {row.clients_per_pass}" if row.clients_per_pass < row.clients else ""
    return (
        f"{row.model:14}{row.clients:5} {row.precision:10}{row.method:9}{row.hypergradient or '-':14}"
        f"{number(row.plain_ms, '.2f'):>10}{row.ours_ms:10.2f}{number(row.ratio, '.1f'):>7}"
        f"{number(row.peak_gb, '.2f'):>9}{row.ceiling_share:7.1%}{number(row.max_loss_difference, '.1e'):>11}{passes}"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--clients", nargs="+", type=int)
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES))
    parser.add_argument(
        "--methods", nargs="+", default=["homlora", "pf2lora"], choices=["homlora", "pf2lora"]
    )
    parser.add_argument("--hypergradients", nargs="+", default=list(HYPERGRADIENTS), choices=HYPERGRADIENTS)
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument(
        "--minilm", action="store_true", help="MiniLM's shape and texts of varied length on the CPU"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each case")
    parser.add_argument("--repeat", type=int, default=10, help="repetitions of a case, whose median is taken")
    parser.add_argument("--sets", type=int, help="steps with different batches in one repetition")
    parser.add_argument("--skip-plain", action="store_true", help="this project alone: no check, no ratio")
    parser.add_argument("--compile", action="store_true", help="this project with its passes compiled")
    parser.add_argument("--plain-clients", type=int, help="clients that the plain way is timed on, at most")
    parser.add_argument(
        "--clients-per-pass", type=int, help="clients in one pass, at most; fewer where memory ends"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no case after that"
    )
    options = parser.parse_args(arguments)
    for name, value in vars(defaults(options)).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def defaults(options: argparse.Namespace) -> argparse.Namespace:
    """What is measured where the user names nothing else."""
    if options.small:
        models, clients, precisions, sets, plain = ["small-roberta", "small-gpt2"], [1, 2], list(DTYPES), 2, 2
    elif options.minilm:
        models, clients, precisions, sets, plain = ["minilm"], [1, 8], list(DTYPES), WINDOW, 2
    else:
        models = ["roberta-base", "roberta-large", "gpt2-medium", "gpt2-xl"]
        clients, precisions, sets, plain = [1, 8, 32, 128], list(DTYPES), 1, 2
    return argparse.Namespace(
        models=models, clients=clients, precisions=precisions, sets=sets, plain_clients=plain
    )


def main(arguments: list[str] | None = None) -> list[Row]:
    measurement = Measurement(parse(arguments))
    transformers.logging.set_verbosity_error()
    print(HEADER, flush=True)
    with float32_products("high" if measurement.device.type == "cuda" else "highest"):
        for name in measurement.options.models:
            measurement.model(name)
    measurement.close()
    return measurement.rows


if __name__ == "__main__":
    main()
