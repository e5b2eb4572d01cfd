"""Time per client-step and memory against the number of clients: `python benchmarks/clients_scale.py --json FILE`.

Whole rounds of the local engine, batches drawn and states moved in and out as in training. On CUDA RoBERTa-base in
bfloat16, 32 clients in one pass, the others' adapters and moments on the host; on a CPU a small model with up to 10,000
clients. The rows of all clients are held from the start, so that what grows with M is what the engine needs for it.
`--draw FILE...` draws the figure from such files and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from shapes import SHAPES, Workload
from timing import float32_products, host_peak_gb, machine, peak_gb, start_host_memory, start_memory, versions
from torch import Tensor

from pf2lora.engines.local import train
from pf2lora.methods import METHODS
from pf2lora.run.workload import DTYPES, choose_device


@dataclass
class Row:
    """One number of clients. `host_gb` is the process's peak, `host_before_gb` what it held before there was a state,
    `state_gb` the size of all clients' adapters, heads and moments."""

    model: str
    clients: int
    clients_per_pass: int
    batch: int
    length: int
    precision: str
    method: str
    hypergradient_mode: str | None
    steps: int
    round_seconds: float
    client_step_ms: float
    device_gb: float | None
    host_gb: float
    host_before_gb: float
    state_gb: float
    machine: str
    versions: str


def tensors_of(tree: Tensor | tuple[Any, ...]) -> list[Tensor]:
    """The tensors of nested tuples."""
    return [tree] if isinstance(tree, Tensor) else [tensor for part in tree for tensor in tensors_of(part)]


def measure(work: Workload, clients: int, options: argparse.Namespace) -> Row:
    """The last of some rounds with `clients` clients."""
    two_level = METHODS[options.method].two_level
    mode = {"hypergradient_mode": options.hypergradient} if two_level else {}
    schedule = {name: getattr(options, name) for name in ("rounds", "steps", "clients_per_pass")}
    start_memory(work.device)
    start_host_memory()
    before = host_peak_gb()
    trial = work.set_up(options.method, clients, **mode, **schedule)
    model, state_gb = trial.model, sum(tensor.nbytes for tensor in tensors_of(trial.state)) / 1e9
    rounds = train(trial.method, trial.F, trial.state, trial.source, trial.schedule, device=work.device)
    del trial  # the engine has the first state, and lets go of it after the first round
    for done in rounds:
        seconds = done.seconds
        del done
    model.remove()
    return Row(
        model=options.model,
        clients=clients,
        clients_per_pass=min(clients, options.clients_per_pass),
        batch=work.shape.batch,
        length=work.shape.length,
        precision=options.precision,
        method=options.method,
        hypergradient_mode=mode.get("hypergradient_mode"),
        steps=options.steps,
        round_seconds=seconds,
        client_step_ms=1000 * seconds / (clients * options.steps),
        device_gb=peak_gb(work.device),
        host_gb=host_peak_gb(),
        host_before_gb=before,
        state_gb=state_gb,
        machine=machine(work.device),
        versions=versions("torch", "transformers"),
    )


def growth(rows: list[Row]) -> str:
    """What one more client costs, from the smallest to the largest number of clients."""
    first, last = rows[0], rows[-1]
    more = last.clients - first.clients
    if not more:
        return "one number of clients: no growth to tell"
    host = (last.host_gb - first.host_gb) / more * 1e6
    state = (last.state_gb - first.state_gb) / more * 1e6
    slower = last.client_step_ms / first.client_step_ms
    return (
        f"from {first.clients} to {last.clients} clients: {slower:.2f} times the time per client-step; "
        f"one more client takes {host:.1f} kB of host memory, {state:.1f} kB of it adapters, head and moments"
    )


def line(row: Row) -> str:
    device = "-" if row.device_gb is None else f"{row.device_gb:.2f}"
    return (
        f"{row.model:14}{row.clients:7}{row.clients_per_pass:10}{row.client_step_ms:16.3f}{row.round_seconds:10.1f}"
        f"{device:>11}{row.host_gb:9.2f}{row.state_gb:10.3f}"
    )


HEADER = (
    f"{'model':14}{'M':>7}{'per pass':>10}{'ms/client-step':>16}{'round s':>10}{'device GB':>11}{'host GB':>9}"
    f"{'state GB':>10}"
)


def draw(files: list[Path], stem: Path) -> None:
    """Time and memory against M, a line of panels for each file, as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [json.loads(file.read_text()) for file in files]
    lines = {
        "host_gb": ("host", "tab:orange"),
        "device_gb": ("device", "tab:blue"),
        "state_gb": ("adapters, head and moments", "tab:green"),
    }
    figure, panels = pyplot.subplots(len(runs), 2, figsize=(9, 3.2 * len(runs)), squeeze=False)
    for (time_panel, memory_panel), rows in zip(panels, runs):
        clients, first = [row["clients"] for row in rows], rows[0]
        times = [row["client_step_ms"] for row in rows]
        time_panel.plot(clients, times, marker="o", color="tab:blue")
        time_panel.set(ylabel="ms per client-step", ylim=(0, 1.2 * max(times)), xscale="log")
        time_panel.set_title(
            f"{first['model']}, {first['precision']}, {rows[-1]['clients_per_pass']} a pass\n{first['machine']}",
            fontsize=9,
            loc="left",
        )
        for name, (label, colour) in lines.items():
            if first[name] is not None:
                values = [row[name] for row in rows]
                memory_panel.plot(clients, values, marker="o", color=colour, label=label)
        memory_panel.set(ylabel="peak memory, GB", xlim=(0, 1.05 * clients[-1]))
        memory_panel.set_ylim(bottom=0)
        memory_panel.legend(frameon=False, fontsize=8)
        time_panel.set_xticks(clients, [f"{count:,}" for count in clients])
        time_panel.minorticks_off()
        for panel in (time_panel, memory_panel):
            panel.set_xlabel("clients")
            panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    for ending in (".svg", ".png"):
        figure.savefig(stem.with_suffix(ending), dpi=150)
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, even where there is a device")
    parser.add_argument("--model", choices=list(SHAPES))
    parser.add_argument("--clients", nargs="+", type=int)
    parser.add_argument("--clients-per-pass", type=int)
    parser.add_argument("--precision", choices=list(DTYPES))
    parser.add_argument("--method", default="pf2lora", choices=["homlora", "pf2lora"])
    parser.add_argument("--hypergradient", default="difference", choices=["difference", "exact", "none"])
    parser.add_argument("--steps", type=int, help="local steps of a round")
    parser.add_argument("--rounds", type=int, default=2, help="the last of them counts")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no case after that"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after each case")
    parser.add_argument("--figure", type=Path, metavar="STEM", help="draw STEM.svg and STEM.png")
    parser.add_argument(
        "--draw", nargs="+", type=Path, metavar="FILE", help="only draw, from these JSON files"
    )
    options = parser.parse_args(arguments)
    if options.draw and not options.figure:
        parser.error("--draw needs --figure STEM, the name of the figure to write")
    if options.figure and not (options.draw or options.json):
        parser.error("--figure needs --json FILE (or --draw FILE...), the rows to draw")
    options.cpu = options.cpu or not torch.cuda.is_available()
    small = {
        "model": "small-roberta",
        "clients": [100, 1000, 10000],
        "clients_per_pass": 100,
        "precision": "float32",
    }
    large = {
        "model": "roberta-base",
        "clients": [32, 128, 512, 1000],
        "clients_per_pass": 32,
        "precision": "bfloat16",
    }
    for name, value in ((small | {"steps": 2}) if options.cpu else (large | {"steps": 10})).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(arguments: list[str] | None = None) -> list[Row]:
    options = parse(arguments)
    if options.draw:
        draw(options.draw, options.figure)
        return []
    transformers.logging.set_verbosity_error()
    device = choose_device("cpu" if options.cpu else "cuda")
    started, rows = time.perf_counter(), list[Row]()
    shape = SHAPES[options.model]
    with float32_products("highest" if options.cpu else "high"):
        work = Workload(shape, max(options.clients), device, rows=2 * shape.batch)
        work.to(options.precision)
        print(HEADER, flush=True)
        for clients in sorted(options.clients):
            if time.perf_counter() - started > options.budget:
                print(f"skipped, the budget of {options.budget:g} s is spent: M={clients}")
                continue
            rows.append(measure(work, clients, options))
            print(line(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if rows:
        print(f"{rows[0].machine}; {rows[0].versions}; {growth(rows)}")
    if options.figure:
        draw([options.json], options.figure)
    return rows


if __name__ == "__main__":
    main()
