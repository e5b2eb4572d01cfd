"""What is compared: the package's methods, PF2LoRA as it is without any tuning, and two more plain ways to make HOMLoRA
personal.

Every other variant is tuned alike: its rates, all together, times each of the first `tries` factors, and, while the
best is at an end of those tried, times the next factor beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pf2lora.errors import UserError, unknown
from pf2lora.methods import METHODS, resolved
from pf2lora.run.config import Config, merged

FACTORS = (1.0, 1 / 3, 3.0, 0.1, 10.0, 1 / 30, 30.0, 0.01, 100.0)
"""The defaults first: one try is each at its default."""
MOST_TRIES, MOST_OUTWARD = 5, 2  # so that there is a factor for every try


@dataclass(frozen=True)
class Variant:
    """A method with changed settings. `rates` are the method's own that are tuned beside `lr`, where it is `tuned`.

    One with `candidate` takes no run: it is that candidate of the run of the variant `of`. One that is about the head
    (`of_head`) is the variant `of` itself on a task without a trained head.
    """

    name: str
    label: str
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    of: str = ""
    candidate: str = ""
    of_head: bool = False
    tuned: bool = True

    def run_by(self, has_head: bool) -> str:
        """The variant whose run on a task, with a trained head or without, has its scores."""
        return self.of if self.candidate or (self.of_head and not has_head) else self.name

    def run_settings(self) -> dict[str, Any]:
        return {"method": [self.method]} | dict(self.settings)

    def tried_rates(self, lr: float, factor: float) -> dict[str, float]:
        """The rates of a try; `lr` is the default on the model at hand."""
        first = {"lr": lr} | dict(self.rates)
        return {name: factor * rate for name, rate in first.items()}

    def with_rates(self, config: Config, rates: Mapping[str, float]) -> Config:
        own = {name: rate for name, rate in rates.items() if name in self.rates}
        return replace(
            config,
            training=replace(config.training, lr=rates["lr"]),
            methods=merged(config.methods, {self.method: own}) if own else config.methods,
        )


FIRST = (
    Variant("pf2lora", "PF2LoRA", "pf2lora"),
    Variant("pf2lora-default", "PF2LoRA, nothing set", "pf2lora", tuned=False),
    Variant(
        "pf2lora-layer",
        "PF2LoRA, nothing set but --client-layer",
        "pf2lora",
        {"client_layer": True},
        of="pf2lora-default",
        of_head=True,
        tuned=False,
    ),
    Variant("homlora", "HOMLoRA", "homlora"),
    Variant("hetlora", "HETLoRA", "hetlora"),
    Variant("local", "Local", "local"),
    Variant(
        "homlora-head", "HOMLoRA, personal head", "homlora", {"head": "personal"}, of="homlora", of_head=True
    ),
    Variant("homlora-bias", "HOMLoRA, bias per client", "homlora-bias", of="homlora", of_head=True),
    Variant("homlora-alone", "HOMLoRA, then alone", of="homlora", candidate="personal_steps"),
)
"""What is run on every task before anything else."""
OWN_RATES = {"per-fedavg": {"adaptation_lr": 0.01}}
REFERENCE = "local"  # what sharing must not make a client worse than


@cache
def variants() -> dict[str, Variant]:
    """The first ones, then every other method of the package."""
    rest = [
        Variant(name, METHODS[name].label, name, rates=OWN_RATES.get(name, {}))
        for name in METHODS.own
        if name not in {variant.name for variant in FIRST}
    ]
    return {variant.name: variant for variant in (*FIRST, *rest)}


def choose_variants(names: Sequence[str]) -> list[Variant]:
    """The variants called `names`, which may be sets of methods, in the order of the benchmark; all without names."""
    names = [] if "all" in names else resolved(names)
    for name in names:
        if name not in variants():
            raise unknown("variant", name, variants())
    return [variant for variant in variants().values() if not names or variant.name in names]


def check_tries(tries: int, outward: int) -> None:
    for flag, value, least, most in (
        ("--tries", tries, 1, MOST_TRIES),
        ("--outward", outward, 0, MOST_OUTWARD),
    ):
        if not least <= value <= most:
            raise UserError(f"{flag} is {value}; it must lie between {least} and {most}")


def beyond(losses: Mapping[float, float | None]) -> float | None:
    """The factor to try next: the one beyond the best of those tried, by factor, where that is an end of them. What
    diverged is no best one, but an end."""
    known = {factor: loss for factor, loss in losses.items() if loss is not None}
    if not known:
        return None
    best = min(known, key=known.__getitem__)
    if best == max(losses):
        return min((factor for factor in FACTORS if factor > best), default=None)
    if best == min(losses):
        return max((factor for factor in FACTORS if factor < best), default=None)
    return None
