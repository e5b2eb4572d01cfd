"""Where the time of `make demo` goes: `python benchmarks/demo_profile.py [--json FILE]`.

The demo itself, with a clock around each kind of work. The first step of each method is counted apart: it sets up what
later steps find ready. What is under no clock (the rounds' averages, the rest) is `other`.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402
from timing import machine, versions  # noqa: E402

from pf2lora import report  # noqa: E402
from pf2lora.cli.demo import demo  # noqa: E402
from pf2lora.core.method import Method  # noqa: E402
from pf2lora.engines.stepper import PlainStepper  # noqa: E402
from pf2lora.run import comparison, set_up, trial, workload  # noqa: E402
from pf2lora.run import folder as run_folder  # noqa: E402
from pf2lora.run.costs import StepLedger  # noqa: E402
from pf2lora.tasks.classification.task import Classification  # noqa: E402

spent: dict[str, float] = defaultdict(float)
running: list[str] = []


def clock(where: Any, name: str, kind: str | Callable[..., str]) -> None:
    """Count the time of `where.name` as `kind`, unless it runs inside of something counted."""
    function = getattr(where, name)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if running:
            return function(*args, **kwargs)
        running.append(kind if isinstance(kind, str) else kind(*args))
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[running.pop()] += time.perf_counter() - began

    setattr(where, name, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the seconds here")
    given = parser.parse_args()
    seen: set[str] = set()

    def which_step(stepper: PlainStepper, method: Method, *_: Any) -> str:
        first = method.name not in seen
        seen.add(method.name)
        return "first step of each method" if first else "steps"

    spent["importing"] = time.perf_counter() - STARTED
    clock(Classification, "load_model", "loading the model")
    clock(Classification, "encode", "tokenising")
    clock(workload, "load_clients", "reading the data")
    clock(PlainStepper, "__call__", which_step)
    clock(trial, "models_in_use", "evaluation")
    clock(trial, "measure", "evaluation")
    clock(trial, "learned_ranks", "learned ranks")
    clock(StepLedger, "flops", "counting FLOPs")
    clock(set_up, "set_up", "setting up methods")
    clock(comparison, "set_up", "setting up methods")
    clock(run_folder, "save_client", "writing")
    clock(run_folder, "save_common", "writing")
    clock(report, "build", "writing")
    with tempfile.TemporaryDirectory() as folder:
        demo(Path(folder) / "demo", force=False, print_config=False)
    whole = time.perf_counter() - STARTED
    spent["other"] = whole - sum(spent.values())
    print(f"\n{'':28}{'seconds':>8}{'share':>8}")
    for kind, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{kind:28}{seconds:8.1f}{seconds / whole:8.1%}")
    print(f"{'in all':28}{whole:8.1f}\n{machine(torch.device('cpu'))}; {versions('torch', 'transformers')}")
    if given.json:
        given.json.write_text(json.dumps({k: round(v, 2) for k, v in spent.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
