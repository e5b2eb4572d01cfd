"""The site's side of FLARE: an executor around the worker, the allow-list as an outgoing filter, a steady launcher.

These classes are named in the site's own kit (`local/`), not in what the server sends; a job only picks the executor.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher

from pf2lora.engines.local import NonFiniteLoss
from pf2lora.errors import UserError
from pf2lora.federation import wire
from pf2lora.federation.guard import Guard, Refused
from pf2lora.federation.plan import Plan
from pf2lora.federation.state import StateFolder, StateFolderError
from pf2lora.federation.worker import Worker
from pf2lora.layout import Layout

BODY = "pf2lora"  # the only entry of a message
GUARD = "pf2lora.guard"
RESTARTS = 3


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
            from pf2lora.federation import work

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


class OnlyDeclared(Filter):
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


class SteadyHandle(JobHandleSpec):
    """A job process that is started again when it dies by itself; a running job takes it back as it was."""

    def __init__(self, launch: Any) -> None:
        super().__init__()
        self.launch, self.handle = launch, launch()
        self.ended = threading.Event()

    def terminate(self) -> None:
        self.ended.set()
        self.handle.terminate()

    def poll(self) -> Any:
        """FLARE fails everybody's job when one site's process fails; a site that is gone is only missing."""
        code = self.handle.poll()
        return JobReturnCode.UNKNOWN if code == JobReturnCode.EXECUTION_ERROR else code

    def wait(self) -> None:
        for _ in range(RESTARTS):
            self.handle.wait()
            if self.ended.is_set() or self.handle.poll() != JobReturnCode.EXECUTION_ERROR:
                return
            print("pf2lora: the site's job process died; starting it again", file=sys.stderr, flush=True)
            self.handle = self.launch()
        self.handle.wait()


class SteadyLauncher(ClientProcessJobLauncher):
    """Starts the job process of a site, again if need be."""

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        arguments = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)

        def launch() -> JobHandleSpec:
            fl_ctx.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments, private=True, sticky=False)
            return super(SteadyLauncher, self).launch_job(job_meta, fl_ctx)

        return SteadyHandle(launch)
