"""Bad input to the core: one clear line each, saying what is wrong and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import RegressionSource, regression_problem, tiny_problem, tiny_two_level

from pf2lora.adapters.two_level import AdapterSpec
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA

LAYOUT = regression_problem().layout

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "client rank as large": (
        lambda: PF2LoRA.adapter_ranks(4, 4, {}),
        "client_rank is 4 and rank 4; .*client_rank < rank",
    ),
    "client rank larger": (lambda: AdapterSpec(rank=4, client_rank=9), "client_rank is 9 and rank 4"),
    "client rank below zero": (lambda: AdapterSpec(rank=4, client_rank=-1), "client_rank is -1"),
    "no rank": (lambda: AdapterSpec(rank=0, client_rank=0), "rank is 0; it must be at least 1"),
    "dropout of one": (lambda: AdapterSpec(dropout=1.0), r"dropout is 1.0; it must lie in \[0, 1\)"),
    "unknown head": (
        lambda: AdapterSpec(head="own"),
        "head is 'own'; it must be 'shared', 'personal' or 'frozen'",
    ),
    "rank above the layer": (
        lambda: tiny_two_level("roberta", rank=17),
        "rank 17 is above the size of layer 'roberta.encoder.layer.0.attention.self.query', which is 16",
    ),
    "rank above a narrow value projection": (
        lambda: tiny_two_level("llama", rank=9),
        "rank 9 is above .*v_proj', which is 8",
    ),
    "unknown target": (
        lambda: tiny_two_level("gpt2", targets=("query",)),
        "no layer matches the target 'query'.*c_attn",
    ),
    "unknown hypergradient mode": (
        lambda: PF2LoRA(LAYOUT, hypergradient_mode="exakt"),
        r"unknown hypergradient mode 'exakt'; did you mean 'exact'\? \(valid: exact, difference, none, auto\)",
    ),
    "the same in Per-FedAvg": (
        lambda: PerFedAvg(LAYOUT, hypergradient_mode="first"),
        "unknown hypergradient mode 'first'",
    ),
    "unknown optimizer": (
        lambda: HomLoRA(LAYOUT, optimizer="adam"),
        "unknown optimizer 'adam'; did you mean 'adamw'",
    ),
    "three batches": (lambda: PF2LoRA(LAYOUT, batches=3), "batches is 3; PF2LoRA draws 2 batches .* or 4"),
    "empty zeta": (lambda: PF2LoRA(LAYOUT, zeta_size=0), "zeta_size is 0; it must be at least 1"),
    "gamma": (lambda: HetLoRA(LAYOUT, gamma=1.0), "gamma is 1.0; .* between 0 and 1"),
    "weights": (
        lambda: HetLoRA(LAYOUT, weight_by="layer"),
        "weight_by is 'layer'; .* 'client' or by 'module'",
    ),
    "no least rank": (lambda: HetLoRA(LAYOUT, r_min=0), "r_min is 0; it must be at least 1"),
    "first rank too small": (
        lambda: HetLoRA(LAYOUT, ranks=(1, 3), r_min=2),
        "first rank of 1 lies below r_min = 2",
    ),
    "first rank too large": (lambda: HetLoRA(LAYOUT, ranks=(1, 5)), "first rank of 5 is above .* r_max = 4"),
    "rounds": (lambda: Schedule(rounds=0), "rounds is 0; it must be at least 1"),
    "steps": (lambda: Schedule(rounds=1, steps=0), "steps is 0; it must be at least 1"),
    "participation": (lambda: Schedule(rounds=1, participation=1.5), r"participation is 1.5; .* in \(0, 1\]"),
    "nobody takes part": (lambda: Schedule(rounds=1, participation=0.0), "participation is 0.0"),
    "weighting": (
        lambda: Schedule(rounds=1, weighting="rows"),
        "weighting is 'rows'; it must be 'uniform' or 'size'",
    ),
    "clients per pass": (lambda: Schedule(rounds=1, clients_per_pass=0), "clients_per_pass is 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(case: str) -> None:
    attempt, message = CASES[case]
    with pytest.raises(UserError, match=message) as caught:
        attempt()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [["client-0", "client-1", "client-2"], []])
def test_a_client_without_rows_and_a_run_without_clients(names: list[str]) -> None:
    p = regression_problem()
    assert isinstance(p.source, RegressionSource)
    emptied = [*p.source.inputs[:2], torch.zeros(0, 6).double()]
    source = replace(p.source, inputs=emptied[: len(names)], names=names)
    method = HomLoRA(p.layout)
    with pytest.raises(UserError, match="at least one client, and every client at least one training row"):
        next(train(method, p.F, method.init(p.x, p.y), source, Schedule(rounds=1)))


def test_hetlora_needs_a_rank_for_every_client() -> None:
    p = regression_problem()
    for ranks in ((), (1, 2)):
        with pytest.raises(UserError, match=f"{len(ranks)} first ranks for 3 clients"):
            HetLoRA(p.layout, ranks=ranks).init(p.x, p.y)


def test_wrong_shapes_say_what_was_expected() -> None:
    p = tiny_problem("roberta")
    batch = p.source.draw([0, 1, 2], [0, 0, 0])
    with pytest.raises(
        ValueError, match=f"expected {p.layout.size} numbers per client, got {p.layout.size - 1}"
    ):
        p.F(p.x[:, 1:], p.y, batch)
    with pytest.raises(ValueError, match="a batch of 9 examples cannot be shared out among 2 clients"):
        p.F(p.x[:2], p.y[:2], batch)
    loss = p.F(p.x, p.y, batch)  # a failed pass leaves nothing behind
    assert torch.isfinite(loss).all()
