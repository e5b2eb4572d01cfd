"""The second-order term by `difference` against `exact`, for both bilevel methods and both precisions.

all-MiniLM-L6-v2 on Rotten Tomatoes sentences (both embedded), two clients, after some rounds in float32; the truth is
`exact` in float64. A share is the term's part of the hypergradient, an error the part of the hypergradient's norm that
it is off; both for the two clients. "step α" is the difference with ε = α on one side.

PYTHONPATH=src python benchmarks/second_order_share.py
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import transformers
from timing import machine, versions
from torch import Tensor

from pf2lora.core.hypergradient import Hyper, Shift, bilevel
from pf2lora.core.method import Loss, State
from pf2lora.data.embedded import minilm_folder
from pf2lora.engines.local import train
from pf2lora.methods.bilevel import Bilevel
from pf2lora.run.config import from_settings
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.workload import load_workload
from pf2lora.tasks.classification.movie_reviews import MOVIE_REVIEWS

SEED = 0
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "steps": 5,
    "max_length": 40,
    "lr": 5e-3,
    "client_lr": 0.1,
    "seed": SEED,
    "dataset": MOVIE_REVIEWS,
    "num_clients": 2,
    "heterogeneity": 0.5,
    "test_ratio": 0.04,
}
COLUMNS = (
    *("method", "α", "share", "precision", "share found"),
    *("error, `exact`", "error, step α", "error, `difference`", "gradients"),
)


class Lower(NamedTuple):
    """A method's bilevel problem in one precision."""

    F: Loss
    x: Tensor
    y: Tensor
    shift: Shift
    inner: Any
    outer: Any

    def hyper(self, alpha: float, mode: str, shift: Shift | None = None) -> Hyper:
        return bilevel(
            self.F, self.x, self.y, alpha, mode, self.inner, self.outer, self.outer, self.inner, shift
        )

    def gradients(self, alpha: float) -> int:
        """How many gradients a step of `difference` takes."""
        calls: list[None] = []

        def counted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            calls.append(None)
            return self.F(x, y, batch)

        self._replace(F=counted).hyper(alpha, "difference", self.shift)
        return len(calls)


def trial_of(name: str, settings: dict[str, Any]) -> Trial:
    return set_up(load_workload(from_settings(settings, "second_order_share")), name, SEED)


def trained(name: str, settings: dict[str, Any]) -> State:
    """The state after the rounds of `settings`."""
    trial = trial_of(name, settings)
    *_, last = train(trial.method, trial.F, trial.state, trial.source, trial.schedule, device="cpu")
    return last.served


def lower_in(name: str, settings: dict[str, Any], state: State, precision: str) -> Lower:
    """The problem that `name` solves at `state`, its base model in a precision."""
    exactly = precision == "float64"  # which is no setting of a run
    trial = trial_of(name, settings | {"precision": "float32" if exactly else precision})
    method, dtype = trial.method, torch.float64 if exactly else torch.float32
    assert isinstance(method, Bilevel)
    if exactly:
        trial.model.model.double()
    x, y = state.x.to(dtype), state.y.to(dtype)
    inner, outer = (trial.source.draw([0, 1], [40 + d] * 2) for d in range(2))
    if method.two_level:
        return Lower(trial.F, x, y, method.shift(y), inner, outer)
    return Lower(lambda x, u, b: trial.F(x + u, y, b), x, torch.zeros_like(x), method.shift(x), inner, outer)


def both(values: Tensor) -> str:
    return ", ".join(f"{value:.1e}" for value in values.tolist())


def error(found: Hyper, truth: Hyper) -> str:
    """How far a hypergradient is from the true one, as a part of it."""
    apart = found.gradient.double() - truth.gradient
    return both(apart.norm(dim=1) / truth.gradient.norm(dim=1))


def row(lower: Lower, alpha: float, truth: Hyper) -> list[str]:
    """What `difference` finds, and how far each way is from the truth."""
    found = lower.hyper(alpha, "difference", lower.shift)
    assert found.share is not None
    ways = lower.hyper(alpha, "exact"), lower.hyper(alpha, "difference"), found
    return [both(found.share), *(error(way, truth) for way in ways), str(lower.gradients(alpha))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(minilm_folder()), help="a model folder")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.1, 0.03, 0.01, 0.001])
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings = SETTINGS | {"model": given.model, "rounds": given.rounds}
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for name in ("pf2lora", "per-fedavg"):
        state = trained(name, settings)
        exactly, *rounded = (
            lower_in(name, settings, state, precision) for precision in ("float64", "float32", "bfloat16")
        )
        for alpha in given.alpha:
            truth = exactly.hyper(alpha, "exact")
            assert truth.share is not None
            for precision, lower in zip(("float32", "bfloat16"), rounded):
                columns = [name, f"{alpha:g}", both(truth.share), precision, *row(lower, alpha, truth)]
                print(f"| {' | '.join(columns)} |", flush=True)
    print(f"{machine(torch.device('cpu'))}; {versions('torch', 'transformers')}; seed {SEED}")


if __name__ == "__main__":
    main()
