"""The site's side of FLARE: an executor around the site session, and the allow-list as an outgoing filter.

These classes are named in the site's own kit (`local/`), not in what the server sends; a job only picks the executor.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from pf2lora.core.layout import Layout
from pf2lora.engines.local import NonFiniteLoss
from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.allow_list import AllowList, Refused
from pf2lora.federation.protocol.checkpoints import CheckpointFolder, StateFolderError
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.site import SiteSession

BODY = "pf2lora"  # the only entry of a message
ALLOW_LIST = "pf2lora.allow_list"


class SiteExecutor(Executor):
    """Runs the site session. A site's own trouble is said in its own log and told to the server as a code only."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = Plan.from_json(plan)
        self.session: SiteSession | None = None
        self.trouble: str | None = None  # what stopped this site

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        request = shareable[BODY]
        number = int(messages.decode(request).fields["round"])
        if self.trouble is None or task_name == "hello":
            try:
                return Shareable({BODY: self.ready(fl_ctx).answer(request)})
            except StateFolderError as error:
                self.stop(fl_ctx, str(error), error.code)
            except NonFiniteLoss as error:
                self.stop(fl_ctx, str(error), "loss")
            except UserError as error:
                self.stop(fl_ctx, str(error), "labels" if "unseen in training" in str(error) else "data")
        return Shareable({BODY: messages.encode({"kind": "problem", "round": number, "code": self.trouble})})

    def ready(self, fl_ctx: FLContext) -> SiteSession:
        """The session, built at the first message: the base model is loaded once and stays."""
        if self.session is None:
            from pf2lora.federation.protocol import site_setup

            site = fl_ctx.get_identity_name()
            file = (
                Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir())
                / site_setup.SITE_FILE
            )
            folder = CheckpointFolder(site_setup.state_folder(self.plan, file), self.plan.name)
            folder.open()
            setup = site_setup.build(self.plan, file, site)
            dtype = messages.dtype_named(self.plan.wire)
            allow_list = AllowList(setup.layout, setup.metrics, dtype)
            fl_ctx.set_prop(ALLOW_LIST, allow_list, private=True, sticky=True)
            self.session = SiteSession(setup, folder, self.plan.run.steps, dtype)
        self.trouble = None
        return self.session

    def stop(self, fl_ctx: FLContext, line: str, code: str) -> None:
        self.trouble = code
        self.log_error(fl_ctx, line, fire_event=False)
        print(f"pf2lora: {fl_ctx.get_identity_name()}: {line}", file=sys.stderr, flush=True)


class AllowListFilter(Filter):
    """The allow-list on outgoing messages. An exception here means that nothing is sent."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        extra = set(shareable) - {BODY, ReservedHeaderKey.HEADERS}
        headers = set(shareable.get(ReservedHeaderKey.HEADERS) or {})
        allow_list = fl_ctx.get_prop(ALLOW_LIST)
        if not isinstance(allow_list, AllowList):  # before the session is built only a problem can be told
            allow_list = AllowList(Layout((), 0), (), messages.DTYPES["float32"])
        try:
            if extra or headers:
                raise Refused(f"the message carries {sorted(extra | headers)[0]!r}, which is not declared")
            allow_list.check(shareable.get(BODY))
        except Refused as error:
            line = f"refused to send a message: {error}"
            print(f"pf2lora: {fl_ctx.get_identity_name()}: {line}", file=sys.stderr, flush=True)
            raise
        return shareable
