"""Small federations whose sites choose by validation rows, and what is read from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_federation import Small

from pf2lora.federation.protocol import outcome
from pf2lora.federation.protocol.run_status import read_final
from pf2lora.federation.protocol.site_setup import state_folder
from pf2lora.run.result import SeedRun
from pf2lora.run.set_up import Trial

AUTO: dict[str, Any] = {
    "client_lr": "auto",
    "rounds": 4,
    "evaluate_every": 1,
    "hypergradient_mode": "exact",
    "personal_steps": None,
}
PRUNES = {"methods": {"hetlora": {"lr": 0.01, "r_min": 1, "gamma": 0.5, "penalty": 10.0}}}  # also in round 4
HALF = {"participation": 0.5, "weighting": "size"}


def close(expected: Any) -> Any:
    return pytest.approx(expected, rel=0, abs=1e-5)


def record_of(small: Small, trial: Trial) -> SeedRun:
    """The federated run as a rehearsal's result has it."""
    final = json.loads((small.root / "server" / "final.json").read_text())
    states = [state_folder(small.plan, file) for file in small.files.values()]
    return outcome.seed_run(small.plan, trial, small.coordinator, final, states)


def common_of(small: Small) -> tuple[torch.Tensor | None, int | None]:
    return small.coordinator.chosen_common(read_final(small.root / "server"))
