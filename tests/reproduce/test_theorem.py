"""The theorem's constants, its two lemmas along a run, and that the run is PF2LoRA's own step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pf2lora.cli.reproduce import app
from pf2lora.core.layout import Entry, Layout
from pf2lora.errors import UserError
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.reproduce.theorem import SIZE, Constants, Settings, make_quadratics, run


def test_the_problems_have_exactly_their_constants() -> None:
    problem = make_quadratics([0, 1], L=1.0, mu=0.2)
    torch.testing.assert_close(torch.linalg.eigvalsh(problem.H)[:, -1], torch.ones(2).double())
    inner = torch.linalg.eigvalsh(problem.H[:, SIZE:, SIZE:])
    torch.testing.assert_close(inner[:, 0], torch.full((2,), 0.2).double())
    assert torch.linalg.eigvalsh(problem.H).min() > 0


def test_the_gradient_of_phi_is_that_of_the_minimised_function() -> None:
    problem = make_quadratics([0], L=1.0, mu=0.2)
    x = torch.randn(1, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    phi = problem.f(x, problem.best_y(x))  # through y*(x): the implicit derivative is there, and vanishes
    expected = torch.autograd.grad(phi.sum(), x)[0]
    torch.testing.assert_close(problem.gradient(x, problem.best_y(x)).detach(), expected)
    assert problem.gap(x).item() > 0


@pytest.mark.parametrize("condition", [2.0, 5.0, 20.0])
def test_the_proofs_own_contraction_is_not_below_one(condition: float) -> None:
    """At the theorem's η its C is 1 + 1/(16κ²): why `bound` takes Young's inequality at αµ/2."""
    constants = Constants(1.0, 1 / condition)
    assert constants.paper_C == pytest.approx(1 + 1 / (16 * condition**2), abs=1e-12)
    assert constants.lower_level(constants.alpha * constants.mu / 2)[0] < 1


def test_no_bound_is_claimed_where_the_constants_do_not_allow_it() -> None:
    one = torch.ones(1)
    assert Constants(1.0, 1 / 2).bound(one, one) is None
    assert Constants(1.0, 1 / 5).bound(one, one) is not None


def test_the_lemmas_and_the_bound_hold_along_a_run() -> None:
    result = run([0, 1, 2], Settings(steps=1500))
    assert max(result["bias_ratio"]) <= 1
    assert max(result["contraction_ratio"]) <= 1
    assert max(result["bound_ratio"]) <= 1
    assert min(result["bias_ratio"]) > 0.01  # measured, and not zero over infinity
    for means in result["mean_squared_gradient"]:
        assert means[-1] < means[0]
        assert means == sorted(means, reverse=True)


def test_the_update_is_pf2loras_own_with_sgd_above() -> None:
    steps, constants = 12, Constants(1.0, 0.2)
    result = run([4], Settings(steps=steps))
    problem = make_quadratics([4], constants.L, constants.mu)
    layout = Layout((Entry("W", "head", (SIZE,), "x"),), SIZE)
    method = PF2LoRA(
        layout, constants.eta, 0.0, "sgd", client_lr=constants.alpha, hypergradient_mode="exact", batches=2
    )
    from pf2lora.reproduce.theorem import _normal

    state = method.init(_normal(4, "x", SIZE)[None], _normal(4, "y", SIZE)[None])
    squares = []
    for _ in range(steps):
        squares.append(problem.gradient(state.x, problem.best_y(state.x)).square().sum().item())
        state, _ = method.step(problem.f, state, None, None)
    assert result["mean_squared_gradient"][0][-1] == pytest.approx(sum(squares) / steps, rel=1e-12)


def test_difference_is_exact_on_a_quadratic() -> None:
    exact, difference = (
        run([0], Settings(steps=30, hypergradient_mode=way)) for way in ("exact", "difference")
    )
    assert exact["bias"][0] == pytest.approx(difference["bias"][0], rel=1e-9)


def test_bad_settings_are_one_line() -> None:
    for bad in ({"condition": 1.0}, {"steps": 3}, {"hypergradient_mode": "magic"}):
        with pytest.raises(UserError):
            Settings(**bad)


def test_the_command_writes_json_and_pictures(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["theorem", "--steps", "50", "--seeds", "2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {f.name for f in tmp_path.iterdir()} == {"theorem.json", "theorem.svg", "theorem.png"}
    result = json.loads((tmp_path / "theorem.json").read_text())
    assert result["T"][-1] == 50
    assert len(result["mean_squared_gradient"]) == 2
