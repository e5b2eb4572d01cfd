"""What a federated run is: the run's config, who takes part, and the server's timeouts and update checks."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pf2lora.errors import UserError, unknown
from pf2lora.federation.protocol.names import check_name, check_sites
from pf2lora.federation.protocol.shamir import majority
from pf2lora.methods import METHODS
from pf2lora.parsing import json_value, refuse
from pf2lora.run.config import Config, from_dict, to_dict
from pf2lora.run.decode import decode
from pf2lora.settings import column_settings

MERGES = ("mean", "median", "trimmed")
WIRES = ("float32", "bfloat16", "int8")
SHARED = ("model", "adapter", "training", "privacy", "task", "methods")  # the tables that all have alike


class NotShared(UserError):
    """A plan that says what is each site's own affair."""


@dataclass(frozen=True)
class Plan:
    """The plan every participant gets. It names no data: where a site's data lies is the site's own affair.

    `metric` is the headline where the lead's data set is known by one; for generated text it says which scores there
    are. `deadline` is in seconds per round, `final_deadline` for the scores at the end; `quorum` the fraction of a
    round's sites that must answer in time, `wait` how many seconds a run below it waits for sites; `norm_limit` how
    many times the median an update's norm, or its change's, may be; `wire` the precision in which the common adapter
    travels; `merge` how updates become one. In a `masked` run the server sees only the sum of a round's updates.
    """

    name: str
    config: Mapping[str, Any]
    method: str
    sites: tuple[str, ...]
    labels: tuple[str, ...] = ()
    metric: str | None = None
    deadline: float = 600.0
    final_deadline: float = 3600.0
    wait: float = 3600.0
    quorum: float = 0.5
    norm_limit: float = 10.0
    wire: str = "float32"
    masked: bool = False
    merge: str = "mean"

    def __post_init__(self) -> None:
        check_name("run", self.name)
        check_sites(self.sites)
        if not self.sites:
            raise UserError("a federation needs at least one site")
        if self.wire not in WIRES:
            raise UserError(f"wire is {self.wire!r}; the common adapter travels as {' or '.join(WIRES)}")
        if not self.deadline > 0:
            raise UserError(f"deadline is {self.deadline}; it is a round's time in seconds, above 0")
        if not self.final_deadline > 0:
            raise UserError(
                f"final_deadline is {self.final_deadline}; it is the time of the last scores in seconds, above 0"
            )
        if not self.wait >= 0:
            raise UserError(f"wait is {self.wait}; it is a time in seconds, 0 or more")
        if not 0 < self.quorum <= 1:
            raise UserError(
                f"quorum is {self.quorum}; it is the fraction of a round's sites that must answer, in (0, 1]"
            )
        if not self.norm_limit > 1:
            raise UserError(f"norm_limit is {self.norm_limit}; it is a multiple of the median norm, above 1")
        task = self.config.get("task", {})
        if ":" in self.method or (isinstance(task, Mapping) and ":" in str(task.get("name", ""))):
            raise UserError(
                "a plan names methods and tasks that every site has installed (entry points pf2lora.methods and "
                "pf2lora.tasks); no site imports a module because a plan says so"
            )
        self.check_shared()
        if METHODS[self.method].pooled:
            raise UserError(
                f"{self.method} pools everybody's data: it is no federation; run it with `pf2lora train`"
            )
        if self.merge not in MERGES:
            raise unknown("merge", self.merge, MERGES)
        if self.merge != "mean":
            self.check_robust()
        if self.masked:
            self.check_masked()

    def check_shared(self) -> None:
        """`NotShared` where the plan says what is a site's own. No lead's does that; one that was made by hand could
        choose which rows are scored, or which column is learned."""
        for table in self.config:
            if table not in SHARED:
                raise NotShared(f"the plan has a table [{table}], which is each site's own affair")
        for table, names in own_settings(type(self.run.task)).items():
            for name in names:
                if name in self.config.get(table, {}):
                    raise NotShared(f"the plan sets {name} of [{table}], which is each site's own affair")

    def check_robust(self) -> None:
        """A UserError where the mean cannot be replaced by a merge that is robust."""
        kind, what = METHODS[self.method], f"merge is {self.merge!r}"
        if self.masked:
            raise UserError(f"{what}: of a masked round the server knows the sum alone, which gives the mean")
        if self.run.privacy.on:
            raise UserError(f"{what}: differential privacy puts its noise on the mean, so it must be 'mean'")
        if self.run.training.weighting != "uniform":
            raise UserError(f"{what}: it has every site once, so weighting must be 'uniform'")
        if kind.not_private or not kind.federated:
            raise UserError(f"{what}: the server of {self.method} does not average what sites send")

    def check_masked(self) -> None:
        """A UserError where a sum of updates is not all that the run needs."""
        kind = METHODS[self.method]
        if not kind.federated:
            raise UserError(f"{self.method} sends nothing: there is nothing to mask")
        if kind.not_private:
            raise UserError(
                f"{self.method}'s updates cannot be masked: its server needs more than their sum ({kind.not_private})"
            )
        if self.wire != "float32":
            raise UserError(
                f"wire is {self.wire!r}: masked updates travel as whole numbers of 64 bits, leave it out"
            )
        if self.run.training.weighting != "uniform":
            raise UserError("weighting is 'size': a masked sum has every site once, so it must be 'uniform'")
        if len(self.sites) < 3:
            raise UserError(
                f"a masked run has 3 sites or more, not {len(self.sites)}: of two, each knows the other's part"
            )

    @classmethod
    def of(
        cls, config: Config, name: str, sites: tuple[str, ...], labels: tuple[str, ...], **options: Any
    ) -> Plan:
        """The plan of a run: what all participants get of its config, without data, model and output."""
        training = config.training
        if len(training.method) != 1 or training.seeds != 1:
            raise UserError("a federation runs one method with one seed")
        agreed = tuple(config.task.agreed(labels))
        options = {"metric": config.task.known_by(config.data.dataset)} | options
        return cls(name, shared_tables(config), training.method[0], sites, agreed, **options)

    @cached_property
    def run(self) -> Config:
        """The run's settings, checked."""
        return from_dict(self.config, "the federation's run")

    @property
    def private(self) -> bool:
        """Whether noise protects what leaves a site."""
        return self.run.privacy.on and METHODS[self.method].federated

    def chosen(self, number: int) -> list[str]:
        """Who takes part in round `number`, present or not: a site computes for itself whose round it is."""
        # With torch, which a site's main process does without.
        from pf2lora.core.randomness import participants

        training = self.run.training
        return [
            self.sites[k]
            for k in participants(training.seed, number, len(self.sites), training.participation)
        ]

    def needed(self, asked: int) -> int:
        """How many of `asked` sites must answer for a round to count; a masked sum takes a majority at least."""
        return max(majority(asked) if self.masked else 1, math.ceil(self.quorum * asked - 1e-9))

    def to_json(self) -> str:
        """The plan as a job carries it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of `to_json`'s text, checked."""
        values = json_value(text, "the plan", refuse)
        return decode(cls, values, "the plan")


def own_settings(task: type) -> dict[str, Collection[str]]:
    """Of the tables that are shared, what is not: where a site's model lies, on which device it works and what its
    columns are called."""
    return {"model": ("name", "device", "precision"), "task": column_settings(task)}


def shared_tables(config: Config) -> dict[str, Any]:
    """What all participants must have alike."""
    tables, own = to_dict(config), own_settings(type(config.task))
    return {key: {k: v for k, v in tables[key].items() if k not in own.get(key, ())} for key in SHARED}
