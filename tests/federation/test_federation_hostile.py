"""A certified site that turns against the others with FLARE's own messages, with real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from small_federation import SITES, make_plan

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from flare_federation import flare

from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.run_status import read_status
from pf2lora.federation.protocol.server import ServerSession

HOSTILE = """
import sys, threading, time

def shout():
    while not getattr(sys.modules.get("nvflare.fuel.f3.cellnet.core_cell"), "CoreCell", None):
        time.sleep(5)  # what is imported in two threads at once locks both
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FedEventHeader
    from nvflare.apis.shareable import Shareable
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell
    from nvflare.fuel.f3.message import Message
    event = Shareable()
    event.set_header(FedEventHeader.EVENT_TYPE, EventType.FATAL_SYSTEM_ERROR)
    event.set_header(FedEventHeader.TIMESTAMP, 1.0)
    event.set_peer_props({"__identity_name__": "site-1"})
    while True:
        time.sleep(2)
        for name, cell in list(CoreCell.ALL_CELLS.items()):
            job = name.removeprefix("site-2")
            for channel, topic, to, said in (
                ("aux_communication", "fed.event", "server" + job, event),
                ("server_command", "abort", "server" + job, Shareable()),
                ("_net_manager", "stop", "server", None),
                ("client_command", "abort", "site-1" + job, Shareable()),
            ):
                try:
                    cell.fire_and_forget(channel, topic, [to], Message(payload=said))
                except Exception:
                    pass

threading.Thread(target=shout, daemon=True).start()
"""


@pytest.mark.slow
def test_a_site_that_says_to_flare_all_that_it_can_ends_nothing(tmp_path: Path) -> None:
    """In its own processes it does what it likes; here, whenever Python starts."""
    plan = make_plan("homlora", SITES[:3], config={"rounds": 25, "steps": 30}, deadline=60)
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "sitecustomize.py").write_text(HOSTILE)
    with flare(tmp_path, plan) as run:
        path = os.pathsep.join([str(tmp_path / "hostile"), os.environ.get("PYTHONPATH", "")])
        run.environment["site-2"] = {"PYTHONPATH": path}
        run.start("server")
        run.start(*plan.sites)
        job = run.submit()
        run.wait(lambda: run.state() == "finished", 240, "the end")
        records = ServerSession(plan, run.run).records
        assert all(record["answered"] == list(plan.sites) for record in records)
        status = read_status(run.run)
        assert status is not None and status.job == job  # of one job
        said = [json.loads(line) for line in (run.kits["server"] / audit.FILE).read_text().splitlines()]
        dropped = [event for event in said if event["event"] == "dropped"]
        assert {event["site"] for event in dropped} == {"site-2"}
        for topic in ("fed.event", "server_command, abort", "_net_manager, stop", "client_command, abort"):
            assert any(topic in event["line"] for event in dropped)
