"""A site's executor without FLARE around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from pf2lora.federation.flare.executor import BODY, SiteExecutor
from pf2lora.federation.protocol.messages import encode

HELLO = encode({"kind": "hello", "round": 1})


def context_of(site: str, kit: Path) -> FLContext:
    """FLARE's context as a site's process has it; its `site.toml` is in `kit`."""
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(kit))
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True, sticky=False)
    return context


def ask(executor: SiteExecutor, context: FLContext, request: bytes) -> Shareable:
    return executor.execute("round", Shareable({BODY: request}), context, Signal())
