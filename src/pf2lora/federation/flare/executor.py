"""The site's side of FLARE: an executor around the worker, and the allow-list as an outgoing filter.

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
from pf2lora.federation.protocol import wire
from pf2lora.federation.protocol.allow_list import Guard, Refused
from pf2lora.federation.protocol.files import StateFolderError
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.state import StateFolder
from pf2lora.federation.protocol.worker import Worker

BODY = "pf2lora"  # the only entry of a message
GUARD = "pf2lora.guard"


class Site(Executor):
    """Runs the worker. A site's own trouble is said in its own log and told to the server as a code only."""

    def __init__(self, plan: str) -> None:
        super().__init__()
        self.plan = Plan.from_json(plan)
        self.worker: Worker | None = None
        self.trouble: str | None = None  # what stopped this site

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        request = shareable[BODY]
        number = int(wire.decode(request).fields["round"])
        if self.trouble is None or task_name == "hello":
            try:
                return Shareable({BODY: self.ready(fl_ctx).answer(request)})
            except StateFolderError as error:
                self.stop(fl_ctx, str(error), error.code)
            except NonFiniteLoss as error:
                self.stop(fl_ctx, str(error), "loss")
            except UserError as error:
                self.stop(fl_ctx, str(error), "labels" if "unseen in training" in str(error) else "data")
        return Shareable({BODY: wire.encode({"kind": "problem", "round": number, "code": self.trouble})})

    def ready(self, fl_ctx: FLContext) -> Worker:
        """The worker, built at the first message: the base model is loaded once and stays."""
        if self.worker is None:
            from pf2lora.federation.protocol import work

            site = fl_ctx.get_identity_name()
            file = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir()) / work.SITE_FILE
            folder = StateFolder(work.state_folder(self.plan, file), self.plan.name)
            folder.open()
            own = work.build(self.plan, file, site)
            dtype = wire.dtype_named(self.plan.wire)
            guard = Guard(own.layout, own.metrics, dtype)
            fl_ctx.set_prop(GUARD, guard, private=True, sticky=True)
            self.worker = Worker(own, folder, self.plan.run.steps, dtype)
        self.trouble = None
        return self.worker

    def stop(self, fl_ctx: FLContext, line: str, code: str) -> None:
        self.trouble = code
        self.log_error(fl_ctx, line, fire_event=False)
        print(f"pf2lora: {fl_ctx.get_identity_name()}: {line}", file=sys.stderr, flush=True)


class AllowListFilter(Filter):
    """The allow-list on outgoing messages. An exception here means that nothing is sent."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        extra = set(shareable) - {BODY, ReservedHeaderKey.HEADERS}
        headers = set(shareable.get(ReservedHeaderKey.HEADERS) or {})
        guard = fl_ctx.get_prop(GUARD)
        if not isinstance(guard, Guard):  # before the worker is ready only a problem can be told
            guard = Guard(Layout((), 0), (), wire.DTYPES["float32"])
        try:
            if extra or headers:
                raise Refused(f"the message carries {sorted(extra | headers)[0]!r}, which is not declared")
            guard.check(shareable.get(BODY))
        except Refused as error:
            line = f"refused to send a message: {error}"
            print(f"pf2lora: {fl_ctx.get_identity_name()}: {line}", file=sys.stderr, flush=True)
            raise
        return shareable
