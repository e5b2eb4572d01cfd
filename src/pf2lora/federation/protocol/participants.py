"""Who is in a run, by the server: what each site said of itself, the method that follows from it, who is asked when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pf2lora.core.layout import Layout
from pf2lora.core.method import Method
from pf2lora.errors import UserError
from pf2lora.federation.protocol.agreement import check_fits, keep_plan
from pf2lora.federation.protocol.allow_list import AllowList
from pf2lora.federation.protocol.checkpoints import writing
from pf2lora.federation.protocol.messages import layout_from
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import told
from pf2lora.federation.protocol.site_masks import check_maskable
from pf2lora.federation.protocol.update_checks import check_rows
from pf2lora.federation.protocol.wire import Wire
from pf2lora.methods import METHODS
from pf2lora.run import privacy
from pf2lora.run.set_up import merging_method


class Participants:
    """The sites of a plan. `folder` is the run's folder on the server."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self.config, self.wire = plan, folder, plan.run, Wire.of(plan)
        self.privacy = privacy.mechanism(
            self.config, METHODS[plan.method], len(plan.sites), (self.config.training.seed,)
        )
        self.sites: dict[str, dict[str, Any]] = {}  # what each said of itself
        self.method: Method | None = None
        self.kept: Any = ()  # what the method keeps between rounds
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            keep_plan(plan, folder / "plan.json")

    def register(self, site: str, data: object) -> None:
        """Take a site's answer to a hello. `Malformed` if it is none; a UserError that names the site and the remedy
        if the site has a problem, or does not fit the others."""
        message = self.allow_list(None).check(data, ("hello", "problem"))
        facts = message.fields
        if message.kind == "problem":
            raise UserError(f"{site} cannot take part: {told(facts, self.plan)} (its own log says more)")
        for other, seen in self.sites.items():
            if other != site:
                check_fits(site, facts, other, seen)
        if self.config.training.weighting == "size" and site in self.sites:
            check_rows(site, facts, self.sites[site])
        self.sites[site] = facts
        if self.method is None:
            self.know_method(facts)

    def know_method(self, facts: Mapping[str, Any]) -> None:
        """The method, from a site's description of its adapter: only `merge` is called, and it sees only what is
        shared."""
        layout = layout_from(facts["layout"])
        self.method = merging_method(self.config, self.plan.method, layout, len(self.plan.sites))
        if self.plan.masked or self.plan.merge != "mean":
            check_maskable(self.method)
        self.kept = self.method.first_server(torch.zeros(0))

    @property
    def known_method(self) -> Method:
        """The method, which takes the sites' description of their adapter."""
        assert self.method is not None, "no site has said hello"
        return self.method

    @property
    def layout(self) -> Layout:
        """The common adapter, as the sites described it."""
        return self.known_method.layout

    def chosen(self, number: int) -> list[str]:
        """Who takes part in round `number` by the plan, present or not."""
        return self.plan.chosen(number)

    def allow_list(self, method: Method | None) -> AllowList:
        """What a site may have sent."""
        metrics = self.config.task.metric_names(self.plan.labels, self.plan.metric)
        return AllowList(method, metrics, self.wire)
