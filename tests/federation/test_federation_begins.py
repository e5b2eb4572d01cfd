"""Which sites a run begins with: FLARE's own scheduler with our jobs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from small_federation import make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import Job, job_from_meta
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.app_common.job_schedulers.job_scheduler import DefaultJobScheduler
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

from pf2lora.federation.flare.admin import Queued, write_job
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.signed_plan import SignedPlan


def begun(job: Job, connected: list[str]) -> set[str] | None:
    """Who gets the job, of those that are connected; None where it waits."""

    def enough(job: Job, asked: dict[str, Any], context: FLContext) -> dict[str, Any]:
        return dict.fromkeys(asked, (True, "token"))

    clients = [SimpleNamespace(name=site) for site in connected]
    engine = Mock(spec=ServerEngineSpec, get_clients=lambda: clients, check_client_resources=enough)
    context = FLContext()
    context.get_engine = lambda: engine
    engine.new_context.return_value = Mock(__enter__=lambda self: context, __exit__=lambda self, *error: None)
    _, sites = DefaultJobScheduler(max_jobs=1).schedule_job(Mock(), [job], context)
    return None if sites is None else set(sites)


@pytest.fixture
def plan() -> Plan:
    return make_plan("homlora", ("a", "b", "c"), quorum=0.6)  # 2 of 3


@pytest.mark.parametrize(
    ("connected", "sites"),
    [
        (["d", "e", "f"], None),  # as many as are needed, and none of them is the plan's
        (["a", "d", "e"], None),
        (["a", "b"], {"a", "b"}),
        (["d", "c", "a"], {"a", "c"}),
        (["a", "b", "c", "d"], {"a", "b", "c"}),
    ],
)
def test_a_run_begins_with_enough_of_its_own_sites_and_goes_to_nobody_else(
    connected: list[str], sites: set[str] | None, plan: Plan, tmp_path: Path
) -> None:
    folder = write_job(plan, SignedPlan(plan.to_json()), tmp_path)
    valid, why, meta = JobMetaValidator().validate(
        plan.name, zip_directory_to_bytes(str(tmp_path), plan.name)
    )
    assert valid, why
    assert meta == json.loads((folder / "meta.json").read_text())
    begins = begun(job_from_meta(meta | {"job_id": "job-1"}), connected)
    assert begins == (sites and {"server", *sites})
    line = Queued(list(plan.sites), 3, 60.0, 0.6).status(connected, meta["min_clients"]).line
    assert bool(line) == (sites is None)
