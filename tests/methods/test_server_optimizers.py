"""FedAvgM, FedAdam and FedYogi: one step by hand, their reductions, and servers that know no client's start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Problem, regression_problem, tiny_problem
from torch import Tensor

from pf2lora.core.method import Surroundings, Updates
from pf2lora.engines.local import Round, Schedule, train
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.server_optimizers import FedAdam, FedAvgM, FedYogi

KINDS = (FedAvgM, FedAdam, FedYogi)


def rounds_of(method: Any, p: Problem, **schedule: Any) -> list[Round]:
    state = method.init(p.x, p.y)
    return [r.kept() for r in train(method, p.F, state, p.source, Schedule(**{"steps": 2} | schedule))]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedavgm_without_momentum_is_homlora(participation: float) -> None:
    p = tiny_problem("roberta", client_rank=0)
    common = {"rounds": 4, "weighting": "size", "participation": participation}
    ours = rounds_of(FedAvgM(p.layout, lr=0.01, momentum=0.0), p, **common)
    for one, other in zip(ours, rounds_of(HomLoRA(p.layout, lr=0.01), p, **common)):
        close(one.served.x, other.served.x)


def answers(method: Any, changes: list[float]) -> list[float]:
    """The server's x̄ − x̄₀ after rounds in which one client, wherever the server is, moves by `changes`."""
    at, found, server = 0.0, [], method.first_server(torch.zeros(0, dtype=torch.float64))
    for number, change in enumerate(changes, 1):
        sent = torch.full((1, method.layout.shared), at + change, dtype=torch.float64)
        answer, server = method.merge(Updates(sent, torch.ones(1), (0,), number), server)
        assert (answer == answer[0]).all()
        at = float(answer[0])
        found.append(at)
    return found


def test_two_steps_of_each_by_hand() -> None:
    layout = regression_problem(client_rank=0).layout
    # m = 0.2, x = 0.5·0.2; m = 0.9·0.2 + 0.1 = 0.28, x = 0.1 + 0.5·0.28
    assert answers(FedAvgM(layout, server_lr=0.5, momentum=0.9), [0.2, 0.1]) == pytest.approx([0.1, 0.24])
    # without a rate it is 1 − β: x = 0.1·0.2, then 0.02 + 0.1·0.28
    assert answers(FedAvgM(layout, momentum=0.9), [0.2, 0.1]) == pytest.approx([0.02, 0.048])
    options: dict[str, Any] = {"server_lr": 0.5, "beta1": 0.9, "beta2": 0.99, "tau": 0.1}
    # m = 0.02; v = 0.99·0.01 + 0.01·0.04; then m = 0.9·0.02 + 0.1·0.3; v = 0.99·v + 0.01·0.09
    v = [0.99 * 0.01 + 0.01 * 0.04]
    v.append(0.99 * v[0] + 0.01 * 0.09)
    x = [0.5 * 0.02 / (v[0] ** 0.5 + 0.1)]
    x.append(x[0] + 0.5 * 0.048 / (v[1] ** 0.5 + 0.1))
    assert answers(FedAdam(layout, **options), [0.2, 0.3]) == pytest.approx(x)
    # v = 0.01 − 0.01·0.04·sign(0.01 − 0.04) = 0.0104; then v − 0.01·0.0025·sign(v − 0.0025) = 0.010375
    x = [0.5 * 0.02 / (0.0104**0.5 + 0.1)]
    x.append(x[0] + 0.5 * (0.9 * 0.02 + 0.1 * 0.05) / (0.010375**0.5 + 0.1))
    assert answers(FedYogi(layout, **options), [0.2, 0.05]) == pytest.approx(x)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_are_served_the_start_with_the_servers_way_from_it(kind: Any) -> None:
    p = tiny_problem("roberta", head="personal", client_rank=0)
    method, shared = kind(p.layout, lr=0.01), p.layout.shared
    first, second = rounds_of(method, p, rounds=2)
    sent = (first.before.x - p.x)[:, :shared]
    answer, _ = method.merge(
        Updates(sent, torch.full((3,), 1 / 3, dtype=torch.float64), (0, 1, 2), 1),
        method.first_server(p.x[:0, 0]),
    )
    close(first.served.x[:, :shared], p.x[:, :shared] + answer)
    assert torch.equal(first.served.x[:, shared:], first.before.x[:, shared:])  # a head of one's own stays
    close(method.common(p.x[:1], second.common, 2)[0, :shared], second.served.x[0, :shared])
    assert torch.equal(method.common(p.x[:1], second.common, 2)[0, shared:], p.x[0, shared:])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_servers_rates_go_by_the_clients(kind: Any) -> None:
    run = Surroundings(regression_problem().layout, 4, 3, (0, 1, 2))
    method = kind.set_up(run, {"lr": 0.02})
    assert (method.server_lr, method.tau) == pytest.approx((0.06, 0.02))
    method = kind.set_up(run, {"lr": 0.02, "server_lr": 0.1, "tau": 0.5})
    assert (method.server_lr, method.tau) == (0.1, 0.5)
    by_hand = kind(run.layout)
    assert (by_hand.server_lr, by_hand.tau) == (3 * by_hand.lr, by_hand.lr)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (FedAvgM, {"momentum": 1.0}),
        (FedAvgM, {"server_lr": 0.0}),
        (FedAdam, {"tau": 0.0}),
        (FedAdam, {"beta1": -0.1}),
        (FedYogi, {"beta2": 1.0}),
    ],
)
def test_impossible_rates_are_refused(kind: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is .*; it must"):
        kind(regression_problem().layout, **wrong)
