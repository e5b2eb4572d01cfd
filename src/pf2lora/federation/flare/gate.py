"""What sites and people may say to the server's FLARE, beyond our own messages. In the main process; loads no torch.

Every message of a participant passes through the cell of the server's main process, wherever it goes to: to the server,
to a job of it, to another participant. FLARE asks there whether the sender is who it says, and nothing else: who has a
certificate may fire events in the server, abort jobs, stop cells, and write to other sites.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReservedTopic, ServerCommandNames
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.fuel.common.exit_codes import PROCESS_EXIT_REASON
from nvflare.fuel.f3.cellnet.defs import (
    CellChannel,
    CellChannelTopic,
    MessageHeaderKey,
    MessagePropKey,
    MessageType,
    ReturnCode,
)
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC
from nvflare.fuel.f3.streaming.stream_const import (
    STREAM_ACK_TOPIC,
    STREAM_CHANNEL,
    STREAM_DATA_TOPIC,
    STREAM_ERROR_TOPIC,
    StreamHeaderKey,
)
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
from nvflare.private.stream_runner import TOPIC_STREAM_ABORT, TOPIC_STREAM_REQUEST

from pf2lora.errors import UserError
from pf2lora.federation.protocol import audit
from pf2lora.federation.protocol.names import OURS, is_person
from pf2lora.federation.protocol.run_status import ENDED, append_line, read_status

AUX, COMMAND = CellChannel.AUX_COMMUNICATION, CellChannel.SERVER_COMMAND
EVERYBODY = {
    (CellChannel.SERVER_MAIN, CellChannelTopic.Challenge),
    (CellChannel.SERVER_MAIN, CellChannelTopic.Register),
    (CellChannel.SERVER_MAIN, CellChannelTopic.Quit),
    (CellChannel.SERVER_MAIN, CellChannelTopic.HEART_BEAT),
    (CellChannel.CELLNET, CellChannelTopic.Bye),
    (STREAM_CHANNEL, STREAM_ACK_TOPIC),
    (STREAM_CHANNEL, STREAM_ERROR_TOPIC),
}
SITES = EVERYBODY | {
    (CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE),
    (AUX, ReservedTopic.SYNC_RUNNER),
    (AUX, ReservedTopic.JOB_HEART_BEAT),
    (AUX, ReservedTopic.TASK_CHECK),
    (COMMAND, ServerCommandNames.GET_TASK),
    (COMMAND, ServerCommandNames.SUBMIT_UPDATE),
}
PEOPLE = EVERYBODY | {
    (CellChannel.HCI, "command"),
    (AUX, TOPIC_STREAM_REQUEST),
    (AUX, TOPIC_STREAM_ABORT),
    (OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC),
}
TOLD = 100  # messages of a sender that are spoken of: it can send as many as it likes


class Gate:
    """Comes after FLARE's own check of the sender, and drops what nobody honest says."""

    def __init__(self, root: Path) -> None:
        """`root` is the server's kit."""
        self.root = root
        self.told: dict[str, set[str]] = {}

    def drop(self, message: Message) -> Message | None:
        """A message, if it goes no further; FLARE takes whatever a filter returns for the end of the matter."""
        name = str(message.get_header(CellMessageHeaderKeys.CLIENT_NAME) or "")
        if name in OURS or may_say(name, message):
            return None
        # FLARE takes the name off a message to another site; the connection's certificate has it, too.
        who = name or str(message.get_prop(MessagePropKey.COMMON_NAME) or "somebody")
        to, (channel, topic) = message.get_header(MessageHeaderKey.DESTINATION), what(message)
        line = f"{who} said to {to} what no participant says ({channel}, {topic}): dropped"
        told = self.told.setdefault(who, set())
        if len(told) < TOLD and line not in told:
            told.add(line)
            tell(self.root, "dropped", who, line)
        return make_reply(ReturnCode.UNAUTHENTICATED, error=line)


def may_say(name: str, message: Message) -> bool:
    """Whether a participant may send this: to the server or a job of it, never to each other. A connection that it
    offers would lead around the gate."""
    to = str(message.get_header(MessageHeaderKey.DESTINATION) or "")
    if FQCN.split(to)[0] != FQCN.ROOT_SERVER or message.get_header(MessageHeaderKey.CONN_URL):
        return False
    if message.get_header(MessageHeaderKey.MSG_TYPE) in (MessageType.REPLY, MessageType.RETURN):
        return True  # an answer, which somebody waits for or nobody
    channel, topic = what(message)
    if (message.get_header(MessageHeaderKey.CHANNEL), channel) == (STREAM_CHANNEL, CellChannel.RETURN_ONLY):
        return True  # likewise
    return (channel, topic) in (PEOPLE if is_person(name) else SITES)


def what(message: Message) -> tuple[str, str]:
    """Channel and topic: of what is streamed, where it is."""
    channel = message.get_header(MessageHeaderKey.CHANNEL)
    topic = message.get_header(MessageHeaderKey.TOPIC)
    if (channel, topic) == (STREAM_CHANNEL, STREAM_DATA_TOPIC):
        channel = message.get_header(StreamHeaderKey.CHANNEL)
        topic = message.get_header(StreamHeaderKey.TOPIC)
    return str(channel), str(topic)


class Outcomes:
    """How a site's part of a job ended. FLARE would end everybody's job where one site says that its part failed."""

    def __init__(self, root: Path, engine: Any) -> None:
        self.root, self.engine = root, engine

    def reported(self, request: Message) -> Message:
        """Note it for the job, which goes on without the site or begins again with it (`presence.py`)."""
        site = str(request.get_header(CellMessageHeaderKeys.CLIENT_NAME))
        told = request.payload if isinstance(request.payload, dict) else {}
        job, code = str(told.get(JobFailureMsgKey.JOB_ID)), told.get(JobFailureMsgKey.CODE)
        jobs = self.engine.job_runner
        if not jobs.is_client_outcome_pending(job, site):
            return make_reply(ReturnCode.OK)
        with suppress(OSError):  # on a full disk
            (self.root / ENDED).mkdir(exist_ok=True)
            (self.root / ENDED / site).write_text(job)
        why = PROCESS_EXIT_REASON.get(code) if isinstance(code, int) else None
        if why or code == JobReturnCode.ABORTED:
            line = f"{site} says that its part of the job failed ({why or 'aborted'}): it alone is left out"
            tell(self.root, "failed at a site", site, line, job=job)
            for folder in (self.root / "runs").glob("*"):
                status = read_status(folder)
                if why and status is not None and status.job == job:
                    with suppress(OSError):
                        append_line(folder, line)
        jobs.resolve_client_outcome(job, site)
        return make_reply(ReturnCode.OK)


def tell(root: Path, event: str, who: str, line: str, **more: str) -> None:
    """Aloud, and in the audit log of the kit `root`, where its disk has room."""
    print(f"pf2lora: {line}", file=sys.stderr, flush=True)
    with suppress(UserError):
        audit.record(root, event, **{"person" if is_person(who) else "site": who}, line=line, **more)


def guard(root: Path, engine: Any) -> None:
    """Put the gate into the server's main process. FLARE looks for the filters of one channel and topic, else for those
    of all: among these is its own check, which must not be passed by."""
    cell = engine.get_cell()
    cell.core_cell.add_incoming_filter(channel="*", topic="*", cb=Gate(root).drop)
    report: Callable[[Message], Message] = Outcomes(root, engine).reported
    topic = CellChannelTopic.REPORT_JOB_FAILURE
    cell.core_cell.register_request_cb(channel=CellChannel.SERVER_MAIN, topic=topic, cb=report)


def survive_bad_bytes() -> None:
    """In a job of the server: FLARE ends the process where a site's answer cannot be decoded, and so everybody's job;
    without an answer that site is only missing."""
    from nvflare.fuel.f3.cellnet import cell

    cell._is_server_job_cell = lambda info: False
