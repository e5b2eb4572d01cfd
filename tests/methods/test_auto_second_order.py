"""`hypergradient = "auto"`: the second-order term is left out where it is under the precision, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from little_world import World, make_world
from tiny import Problem, regression_problem, tiny_problem

import pf2lora
from pf2lora.core.hypergradient import Shift, bilevel
from pf2lora.core.method import Method, over_tensors, take
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods import bilevel as bilevel_methods
from pf2lora.methods.bilevel import ROUNDOFF, Bilevel
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run.events import Note

BILEVEL = [PF2LoRA, PerFedAvg]


def run(method: Method, p: Problem, rounds: int = 4, **schedule: Any) -> list[Round]:
    state = method.init(p.x, p.y)
    return [
        done.kept() for done in train(method, p.F, state, p.source, Schedule(rounds, steps=2, **schedule))
    ]


def in_16_bits(p: Problem) -> Problem:
    """The same problem with a bfloat16 base model and float32 adapters."""
    assert p.model is not None
    p.model.model.to(torch.bfloat16)  # type: ignore[arg-type]
    return p._replace(x=p.x.float(), y=p.y.float())


@pytest.mark.parametrize("kind", BILEVEL)
def test_a_term_that_counts_is_never_left_out(kind: type[Bilevel]) -> None:
    p = regression_problem()
    auto, always = (run(kind(p.layout, hypergradient_mode=way), p)[-1] for way in ("auto", "difference"))
    assert torch.equal(auto.served.x, always.served.x) and torch.equal(auto.served.y, always.served.y)


@pytest.mark.parametrize("kind", BILEVEL)
def test_a_term_under_the_precision_is_left_out_and_measured_again(
    kind: type[Bilevel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bilevel_methods, "MEASURED_FOR", 4)  # steps: two rounds
    monkeypatch.setitem(ROUNDOFF, "bfloat16", 10.0)  # everything is under it
    p = regression_problem()
    rounds = run(kind(p.layout, hypergradient_mode="auto", precision="bfloat16"), p, rounds=7)
    measured = [r.stats.second_order is not None for r in rounds]
    assert measured == [True, False, False, True, False, False, True]
    assert rounds[2].served.opt.age.flatten().tolist() == [4.0] * 3


def test_each_client_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a threshold between the clients' shares some leave it out, and each ends as it does without the others."""
    monkeypatch.setattr(PF2LoRA, "shift", lambda self, lower: None)  # it would go by the threshold, too
    p = regression_problem()
    method = PF2LoRA(p.layout, hypergradient_mode="auto", precision="bfloat16")
    shares = run(method, p, rounds=1)[0].served.opt.share.flatten()
    monkeypatch.setitem(ROUNDOFF, "bfloat16", float(shares.median()) * 1.0001)
    rounds = run(method, p, rounds=2)
    found = rounds[1].stats.second_order
    assert found is not None and sorted(torch.isnan(found).all(0).tolist()) == [False, True, True]
    whole = rounds[1].before
    for per_pass in (1, 2):
        parts = run(method, p, rounds=2, clients_per_pass=per_pass)[1]
        torch.testing.assert_close(parts.before.x, whole.x, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.stats.loss, rounds[1].stats.loss, rtol=0, atol=1e-12)


def test_in_16_bits_the_difference_measures_the_term_and_not_rounding() -> None:
    """With the step α alone the share was that of rounding, far above the term itself."""
    p = in_16_bits(tiny_problem("roberta"))
    p = p._replace(x=p.x + 0.05 * torch.randn(p.x.shape, generator=torch.Generator().manual_seed(0)))
    batches = [p.source.draw([0, 1, 2], [i] * 3) for i in (0, 1)]
    alpha, method = 1e-3, PF2LoRA(p.layout, precision="bfloat16")

    def share(mode: str, shift: Shift | None = None) -> torch.Tensor:
        inner, outer = batches
        found = bilevel(p.F, p.x, p.y, alpha, mode, inner, outer, outer, inner, shift).share
        assert found is not None
        return found

    exact, short, long = share("exact"), share("difference"), share("difference", method.shift(p.y))
    assert (short > 5 * exact).all()
    assert (long < 3 * exact).all() and (long > exact / 3).all()


def test_leaving_it_out_stays_within_rounding() -> None:
    """In 16 bits, `auto` ends as near to `exact` as `difference` does."""
    ends = {}
    for way in ("exact", "difference", "auto"):
        p = in_16_bits(tiny_problem("roberta"))
        rounds = run(
            PF2LoRA(p.layout, client_lr=1e-3, hypergradient_mode=way, precision="bfloat16"), p, rounds=5
        )
        ends[way] = rounds[-1].served
        if way == "auto":
            assert [r.stats.second_order is not None for r in rounds] == [True] + [False] * 4
    moved = (ends["exact"].x - p.x).norm()
    apart = {way: float((ends[way].x - ends["exact"].x).norm() / moved) for way in ("difference", "auto")}
    assert apart["auto"] < 2 * apart["difference"] + 1e-4 and apart["auto"] < 0.05


def test_a_state_of_one_client_decides_alike() -> None:
    """As a site of a federation asks: from its own state alone."""
    p = regression_problem()
    method = PF2LoRA(p.layout, hypergradient_mode="auto", precision="bfloat16")
    state = run(method, p, rounds=1)[0].served
    together = method.variants_for_round(state, 1)
    for k in range(3):
        (alone,) = method.variants_for_round(over_tensors(torch.clone, take(state, [k])), 1)
        assert alone == together[k]
    assert method.variants_for_round(method.init(p.x, p.y), 1) == [method] * 3
    assert PF2LoRA(p.layout).variants_for_round(state, 1) == [PF2LoRA(p.layout)] * 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_a_run_says_what_it_left_out(world: World) -> None:
    notes: list[str] = []
    settings = world.settings(rounds=3, client_lr=1e-4, hypergradient_mode="auto", precision="bfloat16")
    result = pf2lora.federate(
        **settings, callbacks=[lambda e: notes.append(e.line) if isinstance(e, Note) else None]
    )
    (record,) = result.methods["pf2lora"].runs
    (line,) = [note for note in notes if "second order" in note]
    assert line.startswith("PF2LoRA: second order (auto): left out in 6 of 9 client-rounds")
    assert "bfloat16 resolves 3.9e-03" in line and not any("auto" in w for w in record.warnings)
    assert record.rounds[1].second_order_share is None


def test_an_unknown_way_or_precision_is_refused() -> None:
    p = regression_problem()
    with pytest.raises(UserError, match=r"hypergradient mode .exactly.*auto"):
        PF2LoRA(p.layout, hypergradient_mode="exactly")
    with pytest.raises(UserError, match="precision 'float8'"):
        replace(PF2LoRA(p.layout), precision="float8")
