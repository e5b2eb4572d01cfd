"""What is compared: the package's methods, and two more plain ways to make HOMLoRA personal.

Every variant is tuned alike: its rates, all together, times each of the first `tries` factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pf2lora.errors import UserError, unknown
from pf2lora.methods import METHODS, resolved
from pf2lora.run.config import Config, merged

FACTORS = (1.0, 1 / 3, 3.0, 0.1, 10.0)  # the defaults first: one try is each at its default


@dataclass(frozen=True)
class Variant:
    """A method with changed settings. `rates` are the method's own that are tuned beside `lr`.

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

    def run_by(self, has_head: bool) -> str:
        """The variant whose run on a task, with a trained head or without, has its scores."""
        return self.of if self.candidate or (self.of_head and not has_head) else self.name

    def run_settings(self) -> dict[str, Any]:
        return {"method": [self.method]} | dict(self.settings)

    def tried_rates(self, config: Config, tries: int) -> list[dict[str, float]]:
        """The rates of each try."""
        first = {"lr": config.training.lr} | dict(self.rates)
        return [{name: factor * rate for name, rate in first.items()} for factor in FACTORS[:tries]]

    def with_rates(self, config: Config, rates: Mapping[str, float]) -> Config:
        own = {name: rate for name, rate in rates.items() if name in self.rates}
        return replace(
            config,
            training=replace(config.training, lr=rates["lr"]),
            methods=merged(config.methods, {self.method: own}) if own else config.methods,
        )


FIRST = (
    Variant("pf2lora", "PF2LoRA", "pf2lora"),
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


def check_tries(tries: int) -> None:
    if not 1 <= tries <= len(FACTORS):
        raise UserError(f"--tries is {tries}; it must lie between 1 and {len(FACTORS)}")
