"""What one certified participant can say to FLARE itself: with FLARE's own cell, events, jobs and decoder."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet import cell as cellnet
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessagePropKey
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.private.fed.server.job_runner import JobRunner
from nvflare.widgets.fed_event import FED_EVENT_TOPIC, ServerFedEventRunner
from server_main import Server

from pf2lora.errors import UserError
from pf2lora.federation.flare import gate
from pf2lora.federation.flare.controller import FederationController
from pf2lora.federation.flare.gate import Gate, Outcomes, guard, may_say, survive_bad_bytes
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.names import check_sites
from pf2lora.federation.protocol.run_status import ENDED, Status, read_lines, run_folder, write_status

LEAD = "lead@example.org"


def message(
    name: str, channel: str, topic: str, to: str = "server", *, streamed: bool = False, **headers: Any
) -> Message:
    """A message as it comes to the server's main process."""
    made = {"client_name": name, "cn__origin": name, "cn__destination": to, "cn__msg_type": "req"}
    made |= {"cn__channel": channel, "cn__topic": topic}
    if streamed:
        made |= {"cn__channel": "sm__STREAM", "cn__topic": "sm__DATA", "sm__ch": channel, "sm__tp": topic}
    return Message(made | headers)


@pytest.mark.parametrize(
    "said",
    [
        message("", "task", "challenge"),
        message("site-1", "task", "register"),
        message("site-1", "task", "heart_beat"),
        message("site-1", "task", "report_job_failure"),
        message("site-1", "cellnet.channel", "bye"),
        message("site-1", "admin", "admin", cn__msg_type="reply"),
        message("site-1", "aux_communication", "__sync_runner__", "server.job", streamed=True),
        message("site-1", "aux_communication", "__job_heartbeat__", "server.job", streamed=True),
        message("site-1", "aux_communication", "__task_check__", "server.job", streamed=True),
        message("site-1", "server_command", "get_task", "server.job", streamed=True),
        message("site-1", "server_command", "submit_update", "server.job", streamed=True),
        message("site-1", "return_only", "aux_communication:__end_run__", "server.job", streamed=True),
        message("site-1", "sm__STREAM", "sm__ACK", "server.job"),
        message(LEAD, "task", "register"),
        message(LEAD, "hci_channel", "command", streamed=True),
        message(LEAD, "aux_communication", "ObjectStreamer.Request", streamed=True),
        message(LEAD, "download_service__", "download_service__download", streamed=True),
        message("server_job", "server_parent_listener", "update_run_status"),
        message("server_job", "aux_communication", "__end_run__", "site-1.job", streamed=True),
    ],
)
def test_what_is_said_in_every_run_passes(tmp_path: Path, said: Message) -> None:
    """All that a server heard in runs with stops, restarts and fetches."""
    assert Gate(tmp_path).drop(said) is None
    assert not (tmp_path / audit.FILE).exists()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("name", "channel", "topic", "to"),
    [
        ("site-2", "aux_communication", FED_EVENT_TOPIC, "server"),  # any event, fired in the server
        ("site-2", "aux_communication", FED_EVENT_TOPIC, "server.job"),
        ("site-2", "server_command", "abort", "server.job"),
        ("site-2", "server_command", "handle_dead_job", "server.job"),
        ("site-2", "server_parent_listener", "update_run_status", "server"),
        ("site-2", "_net_manager", "stop", "server"),
        ("site-2", "cellnet.channel", "bulk", "server"),  # holds others
        ("site-2", "client_command", "abort", "site-1.job"),
        ("site-2", "server_command", "get_task", "site-1.job"),
        ("site-2", "hci_channel", "command", "server"),
        (LEAD, "aux_communication", FED_EVENT_TOPIC, "server"),
        (LEAD, "server_command", "submit_update", "server.job"),
        ("serverx", "task", "heart_beat", "serverx"),
    ],
)
def test_what_nobody_honest_says_is_dropped_and_its_sender_named(
    tmp_path: Path, name: str, channel: str, topic: str, to: str, streamed: bool
) -> None:
    kept = Gate(tmp_path)
    said = message(name, channel, topic, to, streamed=streamed)
    assert kept.drop(said) is not None and kept.drop(said) is not None
    (line,) = (tmp_path / audit.FILE).read_text().splitlines()  # once
    assert f'"{"person" if "@" in name else "site"}": "{name}"' in line and topic in line


def test_who_writes_to_another_site_is_named_by_its_connection(tmp_path: Path) -> None:
    said = message("", "client_command", "abort", "site-1.job")
    said.set_prop(MessagePropKey.COMMON_NAME, "site-2")
    assert Gate(tmp_path).drop(said) is not None
    assert '"site": "site-2"' in (tmp_path / audit.FILE).read_text()


def test_a_connection_around_the_gate_is_not_taken(tmp_path: Path) -> None:
    said = message("site-2", "task", "heart_beat")
    assert may_say("site-2", said)
    said.set_header("cn__conn_url", "grpc://evil:1")
    assert not may_say("site-2", said)


def test_a_flood_is_not_written_down(tmp_path: Path) -> None:
    kept = Gate(tmp_path)
    for number in range(3 * gate.TOLD):
        assert kept.drop(message("site-2", "_net_manager", f"topic {number}")) is not None
    assert len((tmp_path / audit.FILE).read_text().splitlines()) == gate.TOLD


def test_no_site_can_be_called_as_the_servers_own_processes() -> None:
    for name in ("server", "server_job"):
        with pytest.raises(UserError, match="taken by the federation itself"):
            check_sites([name])


@pytest.fixture
def no_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE finds cells of this process by their names: none may be left behind."""
    monkeypatch.setattr(CoreCell, "ALL_CELLS", {})


@pytest.mark.usefixtures("no_cells")
def test_flares_cell_asks_the_gate_after_its_own_check(tmp_path: Path) -> None:
    """Its filters for all messages: those for one topic would be asked instead."""
    core, heard, checked = CoreCell("server", "tcp://localhost:1", False, {}), list[str](), list[str]()
    core.add_incoming_filter(channel="*", topic="*", cb=lambda m: checked.append(m.get_header("cn__topic")))

    def take(request: Message) -> None:
        heard.append(request.get_header("cn__topic"))

    core.register_request_cb(channel="aux_communication", topic="*", cb=take)

    def deliver(topic: str) -> None:
        core._process_received_msg(Endpoint("site-2"), None, message("site-2", "aux_communication", topic))

    deliver(FED_EVENT_TOPIC)
    assert heard == [FED_EVENT_TOPIC]  # without the gate
    guard(tmp_path, SimpleNamespace(get_cell=lambda: SimpleNamespace(core_cell=core)))
    deliver(FED_EVENT_TOPIC)
    deliver("__task_check__")
    assert heard == [FED_EVENT_TOPIC, "__task_check__"]
    assert checked == [FED_EVENT_TOPIC, FED_EVENT_TOPIC, "__task_check__"]


# --- events -------------------------------------------------------------------------------------------------


def fire(handler: Any, engine: Any, event: str, **data: Any) -> None:
    """An event of a site, as FLARE fires it where it comes through."""
    done = threading.Event()

    class Engine:
        @contextmanager
        def new_context(self) -> Any:
            context = FLContext()
            context.get_engine = lambda: engine
            yield context

        def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
            handler.handle_event(event_type, fl_ctx)
            done.set()

    runner = ServerFedEventRunner()
    runner.engine, runner.abort_signal = Engine(), Signal()
    said = Shareable(data)
    said.set_header(FedEventHeader.EVENT_TYPE, event)
    said.set_header(FedEventHeader.TIMESTAMP, time.time())
    said.get_peer_prop = lambda *_: "site-2"
    runner._receive(FED_EVENT_TOPIC, said, FLContext())
    assert done.wait(10)
    runner.abort_signal.trigger(True)


def test_an_event_that_came_over_the_network_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = Server(tmp_path)
    job = server.job("first", RunStatus.RUNNING, "running", at=3)
    fire(server.resumer, server.engine, EventType.SYSTEM_START)
    fire(server.resumer, server.engine, EventType.JOB_ABORTED, job_id=job)
    fire(server.resumer, server.engine, EventType.JOB_COMPLETED, job_id=job)
    assert server.status(job) == "RUNNING" and server.run().state == "running" and server.waiting() == []


def test_a_controller_hears_none_either() -> None:
    context = FLContext()
    with pytest.raises(TypeError):  # it goes on to FLARE's own, which takes no such controller
        FederationController.handle_event(Mock(), EventType.START_RUN, context)
    context.set_prop(FLContextKey.EVENT_SCOPE, EventScope.FEDERATION, private=True, sticky=False)
    FederationController.handle_event(Mock(), EventType.START_RUN, context)


# --- how a site's part of a job ended -----------------------------------------------------------------------


@pytest.fixture
def jobs(tmp_path: Path) -> JobRunner:
    """FLARE's own, with a job of two sites."""
    made = JobRunner(str(tmp_path))
    made.running_jobs["job"] = SimpleNamespace(job_id="job", run_aborted=False)
    made._pending_client_outcomes["job"] = {"site-1", "site-2"}
    folder = run_folder(tmp_path, "first")
    folder.mkdir(parents=True)
    write_status(folder, Status("running", 2, 9, "job"))
    return made


def report(root: Path, jobs: JobRunner, code: Any, site: str = "site-2", job: str = "job") -> Any:
    """A site's report; the engine that heard it."""
    run: dict[str, Any] = {"job": {}}
    engine = SimpleNamespace(
        job_runner=jobs, run_processes=run, exception_run_processes={}, lock=threading.Lock()
    )
    said = message(site, "task", "report_job_failure")
    said.payload = {"job_id": job, "code": code, "reason": "because"}
    Outcomes(root, engine).reported(said)
    return engine


@pytest.mark.parametrize(
    ("code", "why"), [(101, "exception"), (102, "unsafe component"), (103, "config error")]
)
def test_one_sites_failed_part_leaves_it_out_alone(
    tmp_path: Path, jobs: JobRunner, code: int, why: str
) -> None:
    engine = report(tmp_path, jobs, code)
    assert engine.exception_run_processes == {} and not jobs.running_jobs["job"].run_aborted
    assert jobs._pending_client_outcomes["job"] == {"site-1"}
    assert (tmp_path / ENDED / "site-2").read_text() == "job"
    line = f"site-2 says that its part of the job failed ({why}): it alone is left out"
    assert read_lines(run_folder(tmp_path, "first")) == [line]
    assert line in (tmp_path / audit.FILE).read_text()


@pytest.mark.parametrize("code", [0, 1, 9, 127, -9, None, "101", [101]])
def test_a_part_that_is_only_over_is_noted(tmp_path: Path, jobs: JobRunner, code: Any) -> None:
    """9 is what a site says when the lead stops the run."""
    engine = report(tmp_path, jobs, code)
    assert engine.exception_run_processes == {} and not jobs.running_jobs["job"].run_aborted
    assert (tmp_path / ENDED / "site-2").read_text() == "job"
    assert read_lines(run_folder(tmp_path, "first")) == []


@pytest.mark.parametrize(("site", "job"), [("site-3", "job"), ("site-2", "other"), ("../x", "job")])
def test_nobody_reports_on_a_job_that_is_not_its_own(
    tmp_path: Path, jobs: JobRunner, site: str, job: str
) -> None:
    report(tmp_path, jobs, 101, site, job)
    assert not (tmp_path / ENDED).exists() and read_lines(run_folder(tmp_path, "first")) == []


@pytest.mark.usefixtures("no_cells")
def test_bytes_that_cannot_be_decoded_do_not_end_the_servers_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cellnet, "_is_server_job_cell", cellnet._is_server_job_cell)  # taken back afterwards
    ended = Mock(side_effect=SystemExit)
    monkeypatch.setattr(cellnet.os, "_exit", ended)
    core = CoreCell("server.job", "tcp://localhost:1", False, {})
    taker = cellnet.Adapter(
        Mock(), core.my_info, Mock(decode_pass_through_channels=(), decode_pass_through_topics=())
    )
    headers = {
        "sm__ch": "server_command",
        "sm__tp": "submit_update",
        "sm__pe": "fobs",
        "cn__origin": "site-2",
    }
    future = SimpleNamespace(headers=headers, result=lambda: b"\x93no fobs")
    with pytest.raises(SystemExit):
        taker.call(future)
    survive_bad_bytes()
    ended.reset_mock()
    with pytest.raises(RuntimeError):  # FLARE logs it, and the site gets no answer
        taker.call(future)
    assert not ended.called
