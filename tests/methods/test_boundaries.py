"""Where a method's conditions turn, what it says, and that it works where its tensors are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import SETTINGS, build, regression_problem
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import over_tensors
from pf2lora.errors import UserError
from pf2lora.methods.bilevel import MEASURED_FOR, ROUNDOFF, Bilevel
from pf2lora.methods.hetlora import HetLoRA, shares
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA

LAYOUT = regression_problem().layout


# ---- HETLoRA ----


@pytest.mark.parametrize("gamma", [0.0, 1.0, -0.1, 1.1])
def test_gamma_lies_strictly_between_zero_and_one(gamma: float) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        HetLoRA(LAYOUT, gamma=gamma)


def test_without_factors_there_is_no_rank_to_have() -> None:
    empty = Layout((), 0)
    assert HetLoRA(empty).ranks == ()
    with pytest.raises(UserError, match="above the adapter's rank, r_max = 0"):
        HetLoRA(empty, ranks=(1,))


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 1e6])
def test_weights_go_by_the_ratio_of_norms_and_not_by_their_size(scale: float) -> None:
    norms = scale * torch.tensor([1.0, 3.0, 0.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(shares(norms), torch.tensor([1.0, 3.0, 0.0, 4.0]).double() / 8)


# ---- auto ----


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_auto_leaves_out_what_is_under_the_roundoff_for_as_long_as_it_was_just_measured(
    precision: str,
) -> None:
    """Under it, and not at it; a client whose share nobody measured is like one whose share counts."""
    p = regression_problem(sizes=(3,) * 5)
    method = PF2LoRA(p.layout, hypergradient_mode="auto", precision=precision)
    state, roundoff = method.init(p.x, p.y), ROUNDOFF[precision]
    share = torch.tensor([0.999 * roundoff, roundoff, 0.0, 0.0, torch.nan], dtype=torch.float64)
    age = torch.tensor([0.0, 0.0, MEASURED_FOR - 1, MEASURED_FOR, 0.0], dtype=torch.float64)
    watched = state.opt._replace(share=share.unsqueeze(1), age=age.unsqueeze(1))
    variants = method.variants_for_round(state._replace(opt=watched), 1)
    without = replace(method, hypergradient_mode="none")
    assert variants == [without, method, without, method, method]


# ---- what a user is told ----


@pytest.mark.parametrize("kind", [PF2LoRA, PerFedAvg])
def test_only_exact_has_something_to_say_before_it_runs(kind: type[Bilevel]) -> None:
    for mode in ("difference", "none", "auto"):
        assert kind(LAYOUT, hypergradient_mode=mode).notes() == []
    (note,) = kind(LAYOUT, hypergradient_mode="exact").notes()
    assert note.startswith("exact second order") and note.endswith("double backward")


def test_only_auto_tells_what_it_left_out_and_only_where_it_measured() -> None:
    shares = [None, 0.25, None, 0.5, 0.125]
    for mode in ("difference", "none", "exact"):
        assert PF2LoRA(LAYOUT, hypergradient_mode=mode).findings(shares) == []
    auto = PF2LoRA(LAYOUT, hypergradient_mode="auto")
    assert auto.findings([None, None]) == [] and auto.findings([]) == []
    (line,) = auto.findings(shares)
    assert "left out in 2 of 5 client-rounds" in line and "was 5.0e-01 of the hypergradient at most" in line


# ---- on a device ----


@pytest.mark.parametrize("setting", SETTINGS)
def test_everything_happens_where_x_is(setting: str) -> None:
    """On a device that is not the CPU (meta: shapes alone): a tensor made elsewhere would not meet x there."""
    p = regression_problem()
    method = build(setting, p)

    def F(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (x.square().sum(1) + 1) * (y.square().sum(1) + 1)

    batches = [p.source.draw([0, 1, 2], [i] * 3) for i in range(method.draws)]
    state = method.init(p.x.to("meta"), p.y.to("meta"))
    state, report = method.step(F, state, *batches)
    state, sent = method.send(state, 1)
    state = method.receive(state, sent[0], 1)
    places: set[str] = set()

    def note(tensor: Tensor) -> Tensor:
        places.add(tensor.device.type)
        return tensor

    over_tensors(note, (state, sent, report.loss))
    assert places == {"meta"}
