"""How a site's job process is started: again, when it dies by itself. Loads no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher

RESTARTS = 3


class RestartingHandle(JobHandleSpec):
    """A job process that is started again when it dies by itself; a running job takes it back as it was."""

    def __init__(self, launch: Callable[[], JobHandleSpec]) -> None:
        super().__init__()
        self.launch, self.handle = launch, launch()
        self.ended = threading.Event()

    def terminate(self) -> None:
        """End the process, for good."""
        self.ended.set()
        self.handle.terminate()

    def poll(self) -> Any:
        """FLARE fails everybody's job when one site's process fails; a site that is gone is only missing."""
        code = self.handle.poll()
        return JobReturnCode.UNKNOWN if code == JobReturnCode.EXECUTION_ERROR else code

    def wait(self) -> None:
        """Until the process ends, and with it the starts that are left to it."""
        for _ in range(RESTARTS):
            self.handle.wait()
            if self.ended.is_set() or self.handle.poll() != JobReturnCode.EXECUTION_ERROR:
                return
            print("pf2lora: the site's job process died; starting it again", file=sys.stderr, flush=True)
            self.handle = self.launch()
        self.handle.wait()


class RestartingLauncher(ClientProcessJobLauncher):
    """Starts the job process of a site, again if need be."""

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Start the job's process as FLARE would, in a handle that can do it again."""
        arguments = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)

        def launch() -> JobHandleSpec:
            fl_ctx.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments, private=True, sticky=False)
            return super(RestartingLauncher, self).launch_job(job_meta, fl_ctx)

        return RestartingHandle(launch)
