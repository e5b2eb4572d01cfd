"""Rules for the lower level that `lower_level.py` tries: how far y moves along its gradient, from a client's own state.

Each is PF2LoRA with another step of y, a method called `lower_level_rules:Class`. Whatever the rule, a step of y is no
longer than `own_size` allows, y has its bias, and D is rescaled by validation rows. Only tensor operations
(no `torch.where` with a number, which torch copies from the host): a step can be recorded as a CUDA graph, and what a
client does depends on nobody beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pf2lora.core.choice import Judge
from pf2lora.core.hypergradient import Hyper, Lower, lower_level, shortened
from pf2lora.core.method import Loss, Method, State, StepStats, gradients, variable
from pf2lora.core.optim import Moments, adamw, no_moments
from pf2lora.errors import unknown
from pf2lora.methods import own_size
from pf2lora.methods.pf2lora import PF2LoRA

RESCALED = ("always", "served", "never")
LEAST, MOST = 0.01, 10.0  # what a rule may make of ALPHA: between these multiples of it
TINY = 1e-30


class Kept(NamedTuple):
    """What a client keeps: PF2LoRA's own (the moments of x), and what its rule for y needs."""

    above: Any
    below: Any  # a tuple of tensors with a leading M


class Descent(NamedTuple):
    """y⁺ = y − step. `slope (M, 1)` or `(M, Q)` is the step's derivative by ∇_yF: α, in the second-order term."""

    step: Tensor
    slope: Tensor
    below: Any


@dataclass(frozen=True)
class Rule(PF2LoRA):
    """The default rule, SGD with α = ALPHA, and what all rules share.

    `decay` is a proximal pull of D to zero in every step, D ← D / (1 + decay·η). `rescale` says when D is rescaled by
    validation rows: "always" (before a client trains on, and before it is served), "served" (only in what is served:
    what a client trains on is never cut), or "never".
    """

    decay: float = 0.0
    rescale: str = "always"

    name: ClassVar[str] = "sgd-below"
    label: ClassVar[str] = "PF2LoRA, SGD below"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rescale not in RESCALED:
            raise unknown("rescale", self.rescale, RESCALED)

    # --- what a rule says -----------------------------------------------------------------------------------

    def start(self, y: Tensor) -> Any:
        """What is kept before the first step."""
        return ()

    def descent(self, lower: Lower, y: Tensor, below: Any) -> Descent:
        """The step of y from the lower level at (x, y; π), before it is cut."""
        return Descent(self.alpha * lower.gradient, y.new_full((len(y), 1), self.alpha), below)

    # --- what is the same for all ---------------------------------------------------------------------------

    @property
    def resizes(self) -> bool:
        return super().resizes and self.rescale != "never"

    def longest(self, y: Tensor) -> Tensor | None:
        if self.client_lr != own_size.AUTO:
            return None
        return y.new_ones(len(y), 1) * (own_size.LONGEST * self.lr * y.shape[1] ** 0.5)

    def resize(self, s: State, judge: Judge, *, serving: bool = False) -> State:
        return super().resize(s, judge, serving=serving) if serving or self.rescale == "always" else s

    def init(self, x: Tensor, y: Tensor) -> State:
        s = super().init(x, y)
        return s._replace(opt=Kept(s.opt, self.start(y)))

    def variants_for_round(self, s: State, number: int) -> list[Method]:
        return super().variants_for_round(s._replace(opt=s.opt.above), number)

    def lowered(self, y: Tensor, found: Descent) -> tuple[Tensor, Tensor]:
        """y⁺ and the slope, once the step is cut to the longest and D has decayed."""
        step, slope, longest = found.step, found.slope, self.longest(y)
        if longest is not None:
            shorter = shortened(step, longest)
            step, slope = shorter * step, shorter * slope
        if self.decay == 0:
            return y - step, slope
        kept = 1 + self.sized(y).to(y) * (1 / (1 + self.decay * self.lr) - 1)
        return kept * (y - step), kept * slope

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        """PF2LoRA's, with α of the rule: the second-order term is ∇_xy F(x, y; ζ) · (slope ∇_y F(x, y⁺; ξ̃))."""
        pi, xi, xi_tilde, zeta = batches if self.batches == 4 else (*batches, batches[1], batches[0])
        if self.zeta_size is not None:
            zeta = zeta.spread(self.zeta_size)
        lower = lower_level(self.effective_mode)(F, s.x, s.y, 1.0, pi, zeta, self.shift(s.y))
        found = self.descent(lower, s.y, s.opt.below)
        y, slope = self.lowered(s.y, found)
        x_, y_ = variable(s.x), variable(y)
        if xi_tilde is xi:
            gx, v = gradients(F(x_, y_, xi), x_, y_)
        else:
            (gx,), (v,) = gradients(F(x_, y, xi), x_), gradients(F(s.x, y_, xi_tilde), y_)
        hyper = Hyper(y, gx, lower.loss, None)
        if lower.second_order is not None:
            second = lower.second_order(slope * v)
            share = second.norm(dim=1) / (gx - second).norm(dim=1).clamp_min(TINY)
            hyper = Hyper(y, gx - second, lower.loss, share)
        x, above = self.follow(hyper, s._replace(opt=s.opt.above))
        return State(x, y, Kept(above, found.below)), StepStats(hyper.loss, hyper.share)


@dataclass(frozen=True)
class Seldom(Rule):
    """The default rule, but before a round D is rescaled only where `between` more local steps have been done; 1 is
    every round."""

    between: int = 40

    name: ClassVar[str] = "seldom-sized"
    label: ClassVar[str] = "PF2LoRA, seldom sized"

    def resizes_before(self, done: int, steps: int, batches: Fraction) -> bool:
        return self.resizes and done > 0 and done // self.between > (done - steps) // self.between


@dataclass(frozen=True)
class OwnRate(Rule):
    """α_k follows the size that the client's validation rows ask for: where D is cut α_k falls, where D grows it rises,
    so that what is taken back does not come again as fast. With `rescale = "served"` the rows move α_k, and not D."""

    name: ClassVar[str] = "own-rate"
    label: ClassVar[str] = "PF2LoRA, a rate of each client's own"

    def start(self, y: Tensor) -> Any:
        return (y.new_full((len(y), 1), self.rate),)

    def descent(self, lower: Lower, y: Tensor, below: Any) -> Descent:
        (alpha,) = below
        return Descent(alpha * lower.gradient, alpha, below)

    def resize(self, s: State, judge: Judge, *, serving: bool = False) -> State:
        found = PF2LoRA.resize(self, s, judge, serving=serving)
        if serving:
            return found
        D, (alpha,) = torch.where(self.sized(s.y), s.y, 0.0), s.opt.below
        size = (found.y * D).sum(1, keepdim=True) / D.square().sum(
            1, keepdim=True
        )  # nan where D is 0: no change
        factor = torch.ones_like(alpha)
        for chosen, times in ((size > 1.2, 1.2), (size < 0.8, 0.85), (size < 0.3, 0.7)):
            factor = torch.where(chosen, times, factor)
        alpha = (alpha * factor).clamp(LEAST * self.rate, MOST * self.rate)
        y = found.y if self.rescale == "always" else s.y
        return State(s.x, y, s.opt._replace(below=(alpha,)))


@dataclass(frozen=True)
class CumulativeNorm(Rule):
    """Tuning-Free Bilevel: α_t = c·η√Q / √(Σ_{i≤t} ‖g_i‖²). The first step is c times the longest, and as y keeps being
    pulled here and there its steps shorten as 1/√t."""

    c: float = 1.0

    name: ClassVar[str] = "cumulative-norm"
    label: ClassVar[str] = "PF2LoRA, inverse cumulative gradient norm"

    def start(self, y: Tensor) -> Any:
        return (y.new_zeros(len(y), 1),)

    def descent(self, lower: Lower, y: Tensor, below: Any) -> Descent:
        (total,) = below
        total = total + lower.gradient.square().sum(1, keepdim=True)
        scale = self.c * self.lr * y.shape[1] ** 0.5
        alpha = (scale / total.sqrt().clamp_min(TINY)).clamp_max(MOST * self.rate)
        return Descent(alpha * lower.gradient, alpha, (total,))


@dataclass(frozen=True)
class CappedPolyak(Rule):
    """α = min(`most`, F(x, y; π) / ‖g‖²): Polyak's step to a loss of 0, which is short where the loss is small."""

    most: float = 1.0

    name: ClassVar[str] = "capped-polyak"
    label: ClassVar[str] = "PF2LoRA, capped Polyak"

    def descent(self, lower: Lower, y: Tensor, below: Any) -> Descent:
        squares = lower.gradient.square().sum(1, keepdim=True).clamp_min(TINY)
        alpha = (lower.loss.unsqueeze(1) / squares).clamp_max(self.most)
        return Descent(alpha * lower.gradient, alpha, below)


@dataclass(frozen=True)
class AdamBelow(Rule):
    """Adam on y at the rate κη; with `decay` it is AdamW on D."""

    kappa: float = 0.3
    decay: float = 10.0

    name: ClassVar[str] = "adam-below"
    label: ClassVar[str] = "PF2LoRA, AdamW below"

    def start(self, y: Tensor) -> Any:
        return no_moments(y)

    def descent(self, lower: Lower, y: Tensor, below: Any) -> Descent:
        nowhere = torch.zeros_like(y)
        moved, below = adamw(lower.gradient, below, nowhere, self.kappa * self.lr, weight_decay=0.0)
        rate = (-moved / below.mean).masked_fill(below.mean == 0, 0.0)
        return Descent(-moved, 0.1 * rate, below)  # g is a tenth of the mean


class Distance(NamedTuple):
    """What Prodigy keeps."""

    moments: Moments
    d: Tensor  # (M, 1) its estimate of how far the best y is, per number
    first: Tensor  # (M, Q) where y began
    drawn: Tensor  # (M, 1) r: how far the gradients draw y on from there
    total: Tensor  # (M, Q) s: their weighted sum


@dataclass(frozen=True)
class ProdigyBelow(Rule):
    """Prodigy's Adam (Mishchenko and Defazio, 2023, Algorithm 4) on y, each client with its own d, which never falls
    and is at most the longest step per number."""

    d0: float = 1e-6

    name: ClassVar[str] = "prodigy-below"
    label: ClassVar[str] = "PF2LoRA, Prodigy below"

    def start(self, y: Tensor) -> Any:
        d, none = y.new_full((len(y), 1), self.d0), y.new_zeros(len(y), 1)
        return Distance(no_moments(y), d, y.clone(), none, torch.zeros_like(y))

    def descent(self, lower: Lower, y: Tensor, below: Any) -> Descent:
        (mean, square, count), d, first, drawn, total = below
        g, root = lower.gradient, 0.999**0.5
        mean = 0.9 * mean + 0.1 * d * g
        square = 0.999 * square + 0.001 * (d * g).square()
        drawn = root * drawn + (1 - root) * d.square() * (g * (first - y)).sum(1, keepdim=True)
        total = root * total + (1 - root) * d.square() * g
        estimate = drawn / total.abs().sum(1, keepdim=True).clamp_min(TINY)
        rate = d / (square.sqrt() + 1e-8 * d)
        longer = torch.maximum(d, estimate.clamp_max(own_size.LONGEST * self.lr))
        kept = Distance(Moments(mean, square, count + 1), longer, first, drawn, total)
        return Descent(rate * mean, 0.1 * d * rate, kept)


@dataclass(frozen=True)
class LowerAfter(Rule):
    """`extra` more lower steps of y, with x still, once the average came back: on the first batch of the next round,
    and in what is served on that same batch.

    A recorded step cannot ask whether it is the first of a round: the extra gradients are computed in every step, and
    multiplied by `fresh`, which is 1 only then. In what is served they come after D was rescaled.
    """

    extra: int = 2

    name: ClassVar[str] = "lower-after"
    label: ClassVar[str] = "PF2LoRA, lower steps after the average"
    adapts_before_use: ClassVar[bool] = True

    def start(self, y: Tensor) -> Any:
        return (y.new_zeros(len(y), 1),)

    def settled(self, F: Loss, s: State, batch: Any) -> Tensor:
        y, (fresh,) = s.y, s.opt.below
        for _ in range(self.extra):
            y_ = variable(y)
            loss = F(s.x, y_, batch)
            lower = Lower(loss.detach(), gradients(loss, y_)[0], None)
            lowered, _ = self.lowered(y, self.descent(lower, y, s.opt.below))
            y = torch.where(fresh > 0, lowered, y)
        return y

    def step(self, F: Loss, s: State, *batches: Any) -> tuple[State, StepStats]:
        after, stats = super().step(F, s._replace(y=self.settled(F, s, batches[0])), *batches)
        (fresh,) = after.opt.below
        return after._replace(opt=after.opt._replace(below=(torch.zeros_like(fresh),))), stats

    def receive(self, s: State, answer: Tensor, number: int) -> State:
        (fresh,) = s.opt.below
        opt = s.opt._replace(below=(torch.ones_like(fresh),))
        return super().receive(s, answer, number)._replace(opt=opt)

    def personal(self, F: Loss, s: State, batch: Any) -> tuple[Tensor, Tensor]:
        return s.x, self.settled(F, s, batch)


@dataclass(frozen=True)
class Decay(Rule):
    """SGD, and D ← D / (1 + decay·η) after every step: only what gradients keep asking for stays."""

    decay: float = 30.0

    name: ClassVar[str] = "decay-below"
    label: ClassVar[str] = "PF2LoRA, decay below"
