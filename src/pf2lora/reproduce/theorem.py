"""The paper's theorem on problems where everything in it is known: strongly convex quadratics, one client, no noise.

`f(x, y) = ½ zᵀHz − bᵀz` with z = (x, y) is µ-strongly convex in y and L-smooth, its Hessian is constant (L_{f,2} = 0),
and y*(x), Φ, ∇Φ have closed forms. The update is the package's own bilevel step (the sign is Algorithm 1's) with the
theorem's α and η. Seeds are different problems; they lie on the client axis, and nobody averages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pf2lora.core.hypergradient import bilevel, lower_level
from pf2lora.core.optim import no_moments, sgd
from pf2lora.core.randomness import generator
from pf2lora.errors import UserError

SIZE = 10  # of x, and of y
RESOLVED = 1e-9  # a gap ‖y − y*‖ under this share of ‖y*‖ is rounding, and no ratio is taken of it


@dataclass(frozen=True)
class Constants:
    """The theorem's α and η, and the constants of its proof, from L = L_{f,1} and µ."""

    L: float
    mu: float

    @property
    def smoothness(self) -> float:
        """L_Φ."""
        return self.L + self.L**2 / self.mu

    @property
    def alpha(self) -> float:
        return 1 / (4 * self.L)

    @property
    def eta(self) -> float:
        L, mu = self.L, self.mu
        N = 25 * L**4 * (4 * L / mu + 1) / (16 * mu**2)
        return min(
            mu**2 / (5 * L**3 * (4 * L / mu - mu / (4 * L)) ** 0.5),
            1 / (8 * self.smoothness),
            (1 / (16 * N)) ** 0.5,
            (1 / (81 * N * self.smoothness)) ** (1 / 3),
        )

    @property
    def bias(self) -> float:
        """A = L(1 + αL)(1 − αµ)^½: the hypergradient's error is at most A‖y − y*(x)‖."""
        return self.L * (1 + self.alpha * self.L) * (1 - self.alpha * self.mu) ** 0.5

    def lower_level(self, young: float) -> tuple[float, float]:
        """C and D of `‖y⁺ − y*(x⁺)‖² ≤ C‖y − y*(x)‖² + D‖∇Φ(x)‖²`, with Young's inequality taken at `young`.

        The proof takes it at αµ.
        """
        D = 2 * (1 + 1 / young) * (self.eta * self.L / self.mu) ** 2
        return (1 + young) * (1 - self.alpha * self.mu) + D * self.bias**2, D

    @property
    def paper_C(self) -> float:
        """The proof's own C. It sums a geometric series in C, so it needs C < 1."""
        return self.lower_level(self.alpha * self.mu)[0]

    def bound(self, gap: Tensor, distance: Tensor) -> Tensor | None:
        """G of `(1/T) Σ ‖∇Φ(x^t)‖² ≤ G/T`, for every T; None where the constants do not allow it.

        `gap` is Φ(x⁰) − inf Φ, `distance` ‖y⁰ − y*(x⁰)‖. The proof's two lemmas, joined with Young's inequality at
        αµ/2 in place of αµ, because at the theorem's η the proof's own C is not below 1 (docs/synthetic.md).
        """
        C, D = self.lower_level(self.alpha * self.mu / 2)
        if C >= 1:
            return None
        error = (0.5 + self.eta * self.smoothness) * self.bias**2 / (1 - C)
        left = 0.5 - self.eta * self.smoothness - error * D
        return (gap / self.eta + error * distance.square()) / left if left > 0 else None


@dataclass(frozen=True)
class Quadratic:
    """S problems side by side."""

    H: Tensor  # (S, 2n, 2n)
    b: Tensor  # (S, 2n)

    def f(self, x: Tensor, y: Tensor, batch: Any = None) -> Tensor:
        z = torch.cat([x, y], dim=1)
        return (z * (0.5 * apply(self.H, z) - self.b)).sum(1)

    def best_y(self, x: Tensor) -> Tensor:
        """y*(x)."""
        return apply(self.inverse, self.b[:, SIZE:] - apply(self.H[:, SIZE:, :SIZE], x))

    @cached_property
    def inverse(self) -> Tensor:
        """(∇_yy f)⁻¹; its condition number is at most L/µ."""
        return torch.linalg.inv(self.H[:, SIZE:, SIZE:])

    def gradient(self, x: Tensor, best: Tensor) -> Tensor:
        """∇Φ(x) = ∇_x f(x, y*(x)), with `best` = y*(x)."""
        z = torch.cat([x, best], dim=1)
        return apply(self.H[:, :SIZE], z) - self.b[:, :SIZE]

    def gap(self, x: Tensor) -> Tensor:
        """Φ(x) − inf Φ."""
        best = torch.linalg.solve(self.H, self.b)
        return self.f(x, self.best_y(x)) - self.f(best[:, :SIZE], best[:, SIZE:])


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def make_quadratics(seeds: list[int], L: float, mu: float) -> Quadratic:
    """Random problems whose µ and L are exactly these: λ_min(∇_yy f) = µ, λ_max(∇² f) = L."""
    H = torch.stack([_hessian(seed, L, mu) for seed in seeds])
    best = torch.stack([_normal(seed, "minimiser", 2 * SIZE) for seed in seeds])
    return Quadratic(H, apply(H, best))


def _hessian(seed: int, L: float, mu: float) -> Tensor:
    """Q has the spectrum µ … 0.8 L; x's part is scaled until the largest eigenvalue of the whole is L."""
    spread = torch.linspace(0, 1, SIZE, dtype=torch.float64)
    U, V = (torch.linalg.qr(_normal(seed, name, SIZE, SIZE)).Q for name in ("U", "V"))
    Q = U @ torch.diag(mu * (0.8 * L / mu) ** spread) @ U.mT
    R = _normal(seed, "R", SIZE, SIZE)
    R = R / torch.linalg.matrix_norm(R, 2)
    schur = V @ torch.diag(10 ** (spread - 0.5) / L) @ V.mT  # ∇²Φ before scaling: a spectrum of one decade
    whole = torch.cat([torch.cat([R @ torch.linalg.solve(Q, R.mT) + schur, R], 1), torch.cat([R.mT, Q], 1)])
    low, high = 0.0, L
    for _ in range(100):  # the largest eigenvalue grows with the scale
        middle = (low + high) / 2
        scale = torch.cat([torch.full((SIZE,), middle), torch.ones(SIZE)]).double()
        scaled = scale * whole * scale.unsqueeze(1)
        too_large = torch.linalg.eigvalsh(scaled)[-1] > L
        low, high = (low, middle) if too_large else (middle, high)
    return scaled


def _normal(seed: int, stream: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "theorem", stream), dtype=torch.float64)


@dataclass(frozen=True)
class Settings:
    """`condition` is L/µ, with L = 1."""

    condition: float = 5.0
    steps: int = 30_000
    hypergradient_mode: str = "exact"

    def __post_init__(self) -> None:
        lower_level(self.hypergradient_mode)
        if not 1.25 < self.condition < float("inf"):
            raise UserError(f"the condition number L/µ is {self.condition}; it must be above 1.25")
        if self.steps < 10:
            raise UserError(f"steps is {self.steps}; it must be at least 10")


def run(
    seeds: list[int], settings: Settings, advance: Callable[..., None] = lambda n=1: None
) -> dict[str, Any]:
    """All steps of all seeds at once, with what the lemmas speak of measured at every step."""
    constants = Constants(1.0, 1 / settings.condition)
    problem = make_quadratics(seeds, constants.L, constants.mu)
    x = torch.stack([_normal(seed, "x", SIZE) for seed in seeds])
    y = torch.stack([_normal(seed, "y", SIZE) for seed in seeds])
    bound = constants.bound(problem.gap(x), (y - problem.best_y(x)).norm(dim=1))
    moments = no_moments(x)
    rows = []
    for _ in range(settings.steps):
        hyper = bilevel(problem.f, x, y, constants.alpha, settings.hypergradient_mode, None, None, None, None)
        best = problem.best_y(x)
        truth = problem.gradient(x, best)
        measured = (truth, hyper.gradient - truth, y - best, hyper.y - best, best)
        rows.append(torch.stack([vector.norm(dim=1) for vector in measured]))
        x, moments = sgd(hyper.gradient, moments, x, constants.eta)
        y = hyper.y
        advance()
    return summarise(seeds, settings, constants, torch.stack(rows, dim=1), bound)


def summarise(
    seeds: list[int], settings: Settings, constants: Constants, norms: Tensor, bound: Tensor | None
) -> dict[str, Any]:
    """Curves at some T, evenly spaced on a log axis, and the largest ratio of each lemma's two sides over all steps.

    `norms (5, T, S)` are those of ∇Φ, the hypergradient's bias, y − y*(x), y⁺ − y*(x) and y*(x).
    """
    gradient, bias, before, after, best = norms.numpy()
    resolved = np.where(before > RESOLVED * best, before, np.inf)
    contraction = (1 - constants.alpha * constants.mu) ** 0.5
    steps = len(gradient)
    T = np.unique(np.geomspace(1, steps, 200).round().astype(int))
    sums = np.square(gradient).cumsum(0)
    tenth = steps // 10
    slope = np.log(sums[-1] / sums[tenth - 1]) / np.log(steps / tenth) - 1
    limit = None if bound is None else bound.numpy()
    return {
        "experiment": "theorem",
        "settings": asdict(settings),
        "constants": asdict(constants)
        | {
            "alpha": constants.alpha,
            "eta": constants.eta,
            "L_phi": constants.smoothness,
            "paper_C": constants.paper_C,
        },
        "seeds": seeds,
        "T": T.tolist(),
        "mean_squared_gradient": (sums[T - 1] / T[:, None]).T.tolist(),
        "slope_last_decade": slope.tolist(),
        "bound": None if limit is None else limit.tolist(),
        "bound_ratio": None if limit is None else (sums[-1] / limit).tolist(),  # the sum only grows with T
        "bias": bias[T - 1].T.tolist(),
        "bias_bound": (constants.bias * before)[T - 1].T.tolist(),
        "bias_ratio": (bias / (constants.bias * resolved)).max(0).tolist(),
        "contraction_ratio": (after / (contraction * resolved)).max(0).tolist(),
    }
