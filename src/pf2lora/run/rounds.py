"""After which rounds clients are measured, and whether patience can end a run that is measured so often."""

from __future__ import annotations

from pf2lora.run.config import TrainingSettings

EVALUATIONS = 10  # of a run, where nobody says


def evaluation_rounds(training: TrainingSettings, times: int = EVALUATIONS) -> set[int]:
    """The rounds after which clients are measured; `times` is that of run/cadence.py."""
    return measured_rounds(training.rounds, training.evaluate_every, times)


def measured_rounds(rounds: int, every: int | None, times: int = EVALUATIONS) -> set[int]:
    """The last always, and each so many; where nobody says, so many `times` at most."""
    every = every or -(-rounds // times)
    return {*range(every, rounds + 1, every), rounds}


def never_stops(training: TrainingSettings, measured: set[int], *, heard_after: int = 0) -> list[str]:
    """One line where patience lasts to the run's end, whatever the losses `measured` after these rounds are: at the
    soonest it ends with so many evaluations beside the first. They are heard of so many rounds later."""
    patience, times = training.patience, len(measured)
    if patience is None:
        return []
    if patience < times and sorted(measured)[patience] + heard_after < training.rounds:
        return []
    often = "once" if times == 1 else f"{times} times"
    return [
        f"--patience {patience} cannot stop this run early, which is evaluated {often} (--evaluate-every)"
    ]
