"""The site's side of FLARE: an executor around the site's session, and the allow-list as an outgoing filter.

These classes are named in the site's own kit (`local/`), not in what the server sends; a job only picks the executor.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal
from torch import OutOfMemoryError

from pf2lora.errors import UserError, one_line
from pf2lora.federation.flare.child import end_with
from pf2lora.federation.protocol import approvals, audit
from pf2lora.federation.protocol.allow_list import ANSWERS, AllowList, read_request
from pf2lora.federation.protocol.checkpoints import CheckpointFolder
from pf2lora.federation.protocol.identity import Authority
from pf2lora.federation.protocol.messages import Malformed, Message, encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE, check_age, read_policy
from pf2lora.federation.protocol.problems import problem_fields
from pf2lora.federation.protocol.removals import removed
from pf2lora.federation.protocol.run_status import Status, run_folder, write_status
from pf2lora.federation.protocol.signed_plan import PlanRefused, SignedPlan
from pf2lora.federation.protocol.site import SiteSession
from pf2lora.federation.protocol.wire import Wire

BODY = "pf2lora"  # the only entry of a message
ALLOW_LIST = "pf2lora.allow_list"  # where the executor leaves it for the filter


class SiteExecutor(Executor):
    """Runs the site's session. A site's own problem is said in its own log and told to the server as a code only."""

    def __init__(self, plan: str, certificate: str = "", signature: str = "", signed_at: int = 0) -> None:
        """The run's plan as JSON, and who signed it when, from the job: nothing of it is used before that was
        checked."""
        super().__init__()
        self.signed = SignedPlan(plan, certificate, signature, signed_at)
        self.plan: Plan | None = None
        self.session: SiteSession | None = None
        self.problem: dict[str, Any] | None = None  # what the server is told of what stopped this site
        self.status = Status("running", 0, 0)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The job's process ends with the site's."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            end_with(os.getppid())

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """The answer to one request. One that cannot be read at all raises, and FLARE tells the server so."""
        data = shareable.get(BODY)
        request, began = read_request(data), time.perf_counter()
        answer = None
        if self.problem is None or request.kind == "hello":
            try:
                answer = self.ready(fl_ctx).answer(request)
            except (UserError, Malformed, OutOfMemoryError) as error:
                self.stop(fl_ctx, one_line(error), problem_fields(error))
        if answer is None:
            answer = encode({"kind": "problem", "round": request.round} | (self.problem or {}))
        self.note(fl_ctx, request, time.perf_counter() - began, len(data), len(answer))
        return Shareable({BODY: answer})

    def note(self, fl_ctx: FLContext, request: Message, seconds: float, received: int, answered: int) -> None:
        """Write down where the run stands, for who looks at this site on its own machine. Not worth a round: where it
        cannot be written, the run goes on."""
        if self.plan is None:  # refused, whatever it is
            return
        status = self.status
        status.received, status.sent = status.received + received, status.sent + answered
        if request.kind == "train":
            status.round, status.seconds = request.round, seconds
        if self.session is not None:
            status.loss = self.session.loss
        if self.problem is None:
            status.state, status.line = "finished" if request.kind == "finish" else "running", ""
        folder = run_folder(kit_of(fl_ctx), self.plan.name)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_status(folder, status)

    def ready(self, fl_ctx: FLContext) -> SiteSession:
        """The session, built at the first message: the base model is loaded once and stays. Who signed the plan, and
        when, is looked at each time: a lead may be removed meanwhile."""
        kit, site = kit_of(fl_ctx), fl_ctx.get_identity_name()
        lead = self.signed.lead(Authority.of(kit / "startup"), removed(kit))
        plan = self.plan or Plan.from_json(self.signed.plan)
        if site not in plan.sites:
            raise PlanRefused("not-named")
        self.plan = plan
        policy = self.session.setup.policy if self.session else read_policy(local_of(fl_ctx) / POLICY_FILE)
        check_age(policy, plan, self.signed.signed_at)
        if self.session is None:
            from pf2lora.federation.protocol import site_setup

            self.status.rounds = plan.run.training.rounds
            file = local_of(fl_ctx) / site_setup.SITE_FILE
            folder = CheckpointFolder(site_setup.state_folder(plan, file), plan.name)
            folder.open()
            setup = site_setup.build(plan, file, site)
            wire = Wire.of(plan)
            allow_list = AllowList(setup.method, setup.metrics, wire)
            fl_ctx.set_prop(ALLOW_LIST, allow_list, private=True, sticky=True)
            self.session = SiteSession(setup, folder, plan.run.training.steps, wire)
            said = {"run": plan.name, "plan": approvals.digest(json.loads(plan.to_json())), "lead": lead}
            audit.record(kit, "takes part", job=fl_ctx.get_job_id(), **said)
        self.problem = None
        return self.session

    def stop(self, fl_ctx: FLContext, line: str, problem: dict[str, Any]) -> None:
        """Say `line` in the site's own log; the server is told `problem` from now on."""
        self.problem = problem
        self.status.state, self.status.line = "stopped", line
        run = {"run": self.plan.name} if self.plan else {}
        audit.record(kit_of(fl_ctx), "stays out", job=fl_ctx.get_job_id(), **run, **problem)
        self.log_error(fl_ctx, line, fire_event=False)
        print(f"pf2lora: {fl_ctx.get_identity_name()}: {line}", file=sys.stderr, flush=True)


class AllowListFilter(Filter):
    """The allow-list on the very bytes that are about to leave. An exception here means that nothing is sent."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The same message, if every part of it is declared; else `Malformed`."""
        extra = set(shareable) - {BODY, ReservedHeaderKey.HEADERS}
        headers = set(shareable.get(ReservedHeaderKey.HEADERS) or {})
        allow_list, kinds = fl_ctx.get_prop(ALLOW_LIST), ANSWERS
        if not isinstance(allow_list, AllowList):  # before the session is built only a problem can be told
            allow_list, kinds = AllowList(None, (), Wire()), ("problem",)
        try:
            if extra or headers:
                raise Malformed(f"the message carries {min(extra | headers)!r}, which is not declared")
            data = shareable.get(BODY)
            message = allow_list.check(data, kinds)
        except Malformed as error:
            line = f"refused to send a message: {error}"
            print(f"pf2lora: {fl_ctx.get_identity_name()}: {line}", file=sys.stderr, flush=True)
            audit.record(kit_of(fl_ctx), "held back", job=fl_ctx.get_job_id(), why=str(error))
            raise
        said = {"kind": message.kind, "round": message.round, "bytes": len(data)}
        digest = hashlib.sha256(data).hexdigest()
        # What cannot be written down does not leave: this raises, too.
        audit.record(kit_of(fl_ctx), "sent", job=fl_ctx.get_job_id(), **said, sha256=digest)
        return shareable


def local_of(fl_ctx: FLContext) -> Path:
    """The folder of the site's own rules."""
    return Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir())


def kit_of(fl_ctx: FLContext) -> Path:
    """The site's kit."""
    return local_of(fl_ctx).parent
