"""How a method is set up in its run: what a user may set, its adapter's ranks, what follows from the run."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

import pytest
from tiny import regression_problem

from pf2lora.core.method import Surroundings
from pf2lora.core.rates import rate_in_numbers
from pf2lora.methods import METHODS
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.newcomer import Newcomer
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run.config import TrainingSettings

COMMON = {"lr": float | Literal["auto"], "weight_decay": float, "optimizer": str, "rank": int}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("homlora", {}),
        ("local", {}),
        ("centralized", {"same_examples": bool}),
        ("hetlora", {"r_min": int, "r_max": int, "gamma": float, "penalty": float, "weight_by": str}),
        ("per-fedavg", {"hypergradient_mode": str, "adaptation_lr": float}),
        ("homlora-ft", {"finetune_steps": int}),
        ("homlora-bias", {"bias_lr": float}),
        ("ditto", {"penalty": float}),
        ("feddpa-t", {"mixing_weight": float, "client_rank": int}),
        ("feddpa-f", {"mixing_weight": float, "finetune_steps": int}),
        ("fedprox", {"mu": float}),
        ("fedsa-lora", {}),
        ("ffa-lora", {"b_lr_ratio": float}),
        ("rolora", {}),
        ("fedavgm", {"server_lr": float | None, "momentum": float}),
        ("fedadam", {"server_lr": float, "beta1": float, "beta2": float, "tau": float}),
        ("fedyogi", {"server_lr": float, "beta1": float, "beta2": float, "tau": float}),
        ("scaffold", {}),
        ("fedex-lora", {"residual_rank": int}),
        ("flexlora", {"r_min": int, "r_max": int}),
        ("pf2lora-joint", {"client_lr": float | Literal["auto"], "client_rank": int}),
        (
            "pf2lora",
            {
                "hypergradient_mode": str,
                "client_lr": float | Literal["auto"],
                "client_rank": int,
                "batches": int,
                "zeta_size": int | None,
            },
        ),
    ],
)
def test_what_a_user_may_set(name: str, own: dict[str, object]) -> None:
    """A method's own fields and its adapter's ranks; never what follows from the run."""
    assert METHODS[name].parameters() == COMMON | own


def test_an_adapters_ranks_are_the_runs_unless_the_method_has_its_own() -> None:
    for one_level in (HomLoRA, PerFedAvg):
        assert one_level.adapter_ranks(8, 2, {}) == (8, 0)  # no client adapters
        assert one_level.adapter_ranks(8, 2, {"rank": 5, "client_rank": 3}) == (5, 0)
    assert PF2LoRA.adapter_ranks(8, 2, {}) == (8, 2)
    assert PF2LoRA.adapter_ranks(8, 2, {"rank": 5}) == (5, 2)
    assert PF2LoRA.adapter_ranks(8, 2, {"client_rank": 3}) == (8, 3)


def test_hetloras_adapter_has_r_max_or_half_as_much_again_as_the_rank() -> None:
    assert HetLoRA.adapter_ranks(8, 2, {}) == (12, 0)
    assert HetLoRA.adapter_ranks(5, 2, {}) == (7, 0)
    assert HetLoRA.adapter_ranks(8, 2, {"rank": 6}) == (9, 0)
    assert HetLoRA.adapter_ranks(8, 2, {"r_max": 10}) == (10, 0)
    assert HetLoRA.adapter_ranks(8, 2, {"rank": 6, "r_max": 7}) == (7, 0)


def test_hetloras_first_ranks_rise_from_r_min_over_all_clients() -> None:
    layout = regression_problem(rank=6).layout
    everybody = tuple(range(4))
    method = HetLoRA.set_up(Surroundings(layout, 4, 4, everybody), {"gamma": 0.5, "lr": 0.3})
    assert (method.r_min, method.ranks, method.gamma, method.lr) == (4, (4, 4, 5, 5), 0.5, 0.3)
    method = HetLoRA.set_up(Surroundings(layout, 4, 4, everybody), {"r_min": 2})
    assert (method.r_min, method.ranks) == (2, (2, 3, 4, 5))
    some = HetLoRA.set_up(Surroundings(layout, 4, 4, (3, 1)), {"r_min": 2})  # as the sites at hand have it
    assert some.ranks == (5, 3)
    method = HetLoRA.set_up(Surroundings(layout, 9, 4, everybody), {})  # the adapter is smaller than the rank
    assert (method.r_min, method.ranks) == (6, (6, 6, 6, 6))


def test_a_bilevel_method_learns_the_runs_precision() -> None:
    layout = regression_problem().layout
    run = Surroundings(layout, 4, 3, (0, 1, 2), precision="bfloat16")
    for kind in (PF2LoRA, PerFedAvg):
        method = kind.set_up(run, {"lr": 0.3})
        assert (method.layout, method.precision, method.lr) == (layout, "bfloat16", 0.3)
    plain = HomLoRA.set_up(run, {"lr": 0.3})
    assert (plain.layout, plain.lr) == (layout, 0.3)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_built_by_hand_has_the_defaults_of_a_run(name: str) -> None:
    """What a run's settings and a method call the same has one default; a rate that is left to the model is that of a
    small one."""
    method, run = METHODS[name](regression_problem().layout), TrainingSettings()
    run = replace(run, lr=rate_in_numbers(run.lr, method.layout))
    common = {f.name for f in fields(method)} & {f.name for f in fields(run)}
    assert {"lr", "weight_decay"} <= common and ("client_lr" in common) == name.startswith("pf2lora")
    assert {key: getattr(method, key) for key in common} == {key: getattr(run, key) for key in common}


def test_a_newcomer_has_the_lower_rate_of_pf2lora() -> None:
    layout = regression_problem().layout
    assert Newcomer(layout).client_lr == PF2LoRA(layout).client_lr
    assert Newcomer.two_level and not Newcomer.federated
