"""A site's executor, and the server's controller, without FLARE around them."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

from masked_federation import authority_of, write_kit
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from pf2lora.federation.flare.controller import FederationController
from pf2lora.federation.flare.executor import BODY, SiteExecutor
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.messages import encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.signed_plan import SignedPlan

HELLO = encode({"kind": "hello", "round": 1})


def context_of(site: str, kit: Path) -> FLContext:
    """FLARE's context as a site's process has it; its `site.toml` is in `kit`."""
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(kit))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    return context


def lead_of(kit: Path) -> KitIdentity:
    """The lead of a federation whose authority the kit knows."""
    folder = kit / "lead"
    kit.mkdir(parents=True, exist_ok=True)
    made = KitIdentity.of(folder) if folder.exists() else None
    made = made or write_kit(folder, "lead@example.org", authority_of(kit), role="lead")
    (kit / "startup").mkdir(exist_ok=True)
    shutil.copy(folder / "rootCA.pem", kit / "startup")
    return made


def signed_on(lead: KitIdentity, plan: Plan, when: float) -> SignedPlan:
    """A plan whose signature says that it is of another time."""
    made = SignedPlan(plan.to_json(), lead.certificate, signed_at=int(when))
    return replace(made, signature=lead.sign(made.signed_part()))


def executor_of(plan: Plan, kit: Path) -> SiteExecutor:
    """The executor of a plan that the lead has signed."""
    return SiteExecutor(**asdict(SignedPlan.by(lead_of(kit), plan)))


def controller_of(plan: Plan, root: Path) -> FederationController:
    """The controller of such a plan; `root` is the server's kit and the run's folder in one."""
    made = FederationController(**asdict(SignedPlan.by(lead_of(root), plan)))
    made.root = made.folder = root
    return made


def ask(executor: SiteExecutor, context: FLContext, request: bytes) -> Shareable:
    return executor.execute("round", Shareable({BODY: request}), context, Signal())
