"""FLARE's classes around the two sessions, called directly: no processes, no network."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from figures import figures, private_words
from small_federation import SITES, make_plan, make_small, write_data, write_model, write_site_file

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from site_executor import HELLO, ask, context_of, controller_of, executor_of

from pf2lora.errors import UserError
from pf2lora.federation.flare.controller import FederationController
from pf2lora.federation.flare.exchange import body
from pf2lora.federation.flare.executor import BODY, AllowListFilter
from pf2lora.federation.flare.presence import NewJob
from pf2lora.federation.flare.resumer import note
from pf2lora.federation.protocol.messages import Malformed, decode, encode
from pf2lora.federation.protocol.metrics import Participant, exposition
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.run_status import ALIVE, read_lines, read_status, run_folder
from pf2lora.federation.protocol.run_status import SITES as REGISTERED
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.stopping import QuorumMissed

pytestmark = pytest.mark.usefixtures("one_thread")


def greeted(plan: Plan, folder: Path, hellos: dict[str, Any]) -> FederationController:
    """A controller before its first round, to whom the sites answer as in `hellos`."""
    made = controller_of(plan, folder)
    made.session = ServerSession(plan, folder)
    engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name=site) for site in plan.sites])
    made.fl_ctx = SimpleNamespace(get_engine=lambda: engine)
    answered: Any = lambda name, requests, timeout: hellos  # noqa: E731
    made.exchange = answered  # type: ignore[method-assign]
    made.post = lambda *_: None  # type: ignore[method-assign]
    return made


@pytest.fixture
def hellos(tmp_path: Path) -> dict[str, bytes]:
    """What four sites that fit together answer to a hello."""
    small = make_small(tmp_path / "small", make_plan("homlora"))
    return small.ask(dict.fromkeys(SITES, small.coordinator.hello()))


def test_garbage_in_a_hello_leaves_out_its_site_alone(tmp_path: Path, hellos: dict[str, bytes]) -> None:
    bad = {"site-1": encode({"kind": "problem", "round": 1}), "site-3": None}
    controller = greeted(make_plan("homlora"), tmp_path / "run", hellos | bad)
    controller.collect_hellos()
    assert controller.present == ["site-2", "site-4"]
    said = read_lines(tmp_path / "run")
    assert any("site-1 is left out" in line and "'code'" in line for line in said)
    assert any("site-3 is left out" in line and "same version" in line for line in said)


def test_too_few_hellos_stop_the_run_and_say_why(tmp_path: Path, hellos: dict[str, bytes]) -> None:
    bad = dict.fromkeys(SITES[:3], b"garbage")
    controller = greeted(make_plan("homlora"), tmp_path / "run", hellos | bad)
    with pytest.raises(QuorumMissed, match=r"site-1: its hello cannot be read .*site-3: its hello"):
        controller.collect_hellos()


def test_a_site_that_does_not_fit_is_left_out_alone_wherever_it_stands(
    tmp_path: Path, hellos: dict[str, bytes]
) -> None:
    """It is not the measure of the others, not even where it is the first."""
    for site in SITES:
        other = encode(decode(hellos[site]).fields | {"model": "0" * 64})
        controller = greeted(make_plan("homlora"), tmp_path / site, hellos | {site: other})
        controller.collect_hellos()
        assert controller.present == [s for s in SITES if s != site]
        assert list(controller.status.left_out) == [site]
        assert controller.status.left_out[site].startswith("has another base model than")
        assert any(f"{site} is left out: has another" in line for line in read_lines(tmp_path / site))


def test_where_as_many_do_not_fit_the_run_does_not_begin(tmp_path: Path, hellos: dict[str, bytes]) -> None:
    other = {s: encode(decode(hellos[s]).fields | {"model": "0" * 64}) for s in SITES[:2]}
    controller = greeted(make_plan("homlora"), tmp_path / "run", hellos | other)
    with pytest.raises(UserError, match=r"has another base model than site-1"):
        controller.collect_hellos()


def test_a_site_that_says_it_cannot_take_part_does_not_keep_the_others_from_it(
    tmp_path: Path, hellos: dict[str, bytes]
) -> None:
    told = encode({"kind": "problem", "round": 1, "code": "disk-full"})
    controller = greeted(make_plan("homlora"), tmp_path / "run", hellos | {"site-4": told})
    controller.collect_hellos()
    assert controller.present == list(SITES[:3])
    assert "its state folder is full" in controller.status.left_out["site-4"]
    strict = greeted(make_plan("homlora", quorum=1.0), tmp_path / "all", hellos | {"site-4": told})
    with pytest.raises(QuorumMissed, match="site-4: cannot take part: the disk"):
        strict.collect_hellos()


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR), "refused"),
        (make_reply(ReturnCode.EXECUTION_EXCEPTION), "failed"),
    ],
)
def test_what_flare_says_of_a_failure_is_a_problem(result: Shareable, code: str) -> None:
    assert decode(body(result, 7)).fields == {"kind": "problem", "round": 7, "code": code}


def test_an_answer_that_is_no_message_is_left_to_the_session() -> None:
    assert body(Shareable({BODY: "text"}), 7) == "text"
    assert body(Shareable(), 7) is None


# --- sites that are missing -----------------------------------------------------------------------------------


def test_nobody_waits_for_a_site_that_was_started_again(tmp_path: Path) -> None:
    controller = greeted(make_plan("homlora"), tmp_path, {})
    del controller.exchange  # the real one
    controller.abort = Signal()
    answered: Any = {"site-1": b"one"}

    def post(name: str, site: str, data: bytes, seconds: int, deliver: Any) -> Any:
        if site in answered:
            deliver(answered[site])
        return SimpleNamespace(completion_status="done")

    controller.post = post  # type: ignore[method-assign]
    began = time.monotonic()
    note(tmp_path / REGISTERED, "site-2")  # it registers while it is asked
    os.utime(tmp_path / REGISTERED / "site-2", (time.time() + 1, time.time() + 1))
    requests = dict.fromkeys(("site-1", "site-2"), b"")
    assert controller.exchange("round", requests, 60.0) == answered
    assert time.monotonic() - began < 10
    os.utime(
        tmp_path / REGISTERED / "site-2", (1, 1)
    )  # long before: it is waited for, unless its heart stops
    note(tmp_path / ALIVE, "site-2")
    os.utime(tmp_path / ALIVE / "site-2", (time.time() - 100, time.time() - 100))
    assert controller.exchange("round", requests, 60.0) == answered
    assert time.monotonic() - began < 20
    note(tmp_path / ALIVE, "site-2")
    assert controller.exchange("round", requests, 1.0) == answered
    assert time.monotonic() - began > 1


def test_a_run_below_its_quorum_waits_and_says_so(tmp_path: Path, hellos: dict[str, bytes]) -> None:
    only = {"site-1": hellos["site-1"]}
    controller = greeted(make_plan("homlora", wait=30), tmp_path, only)
    controller.abort = Signal()
    seen: list[str] = []

    def note_and_return(state: str, line: str = "") -> None:
        seen.append(state)
        if state == "waiting":
            assert "0 of 4 sites" in line and "quorum is 2" in line
            controller.returned["site-3"] = hellos["site-3"]  # it comes back

    controller.note = note_and_return  # type: ignore[method-assign]

    def part() -> None:
        if len(controller.present) < 2:
            controller.collect_hellos()

    controller.patiently(part)
    assert controller.present == ["site-1", "site-3"] and seen == ["waiting", "running"]
    assert any("it waits for them up to 30 s" in line for line in read_lines(tmp_path))


def test_it_does_not_wait_longer_than_the_lead_said(tmp_path: Path, hellos: dict[str, bytes]) -> None:
    controller = greeted(make_plan("homlora", wait=0), tmp_path, {"site-1": hellos["site-1"]})
    controller.abort = Signal()
    with pytest.raises(QuorumMissed):
        controller.patiently(controller.collect_hellos)


def test_a_site_that_comes_back_while_the_run_waits_begins_a_new_job(
    tmp_path: Path, hellos: dict[str, bytes]
) -> None:
    controller = greeted(make_plan("homlora", wait=30), tmp_path, {"site-1": hellos["site-1"]})
    controller.abort = Signal()
    note(tmp_path / REGISTERED, "site-2")
    os.utime(tmp_path / REGISTERED / "site-2", (time.time() + 1, time.time() + 1))
    controller.get_client_disconnect_time = lambda site: None
    with pytest.raises(NewJob):
        controller.patiently(controller.collect_hellos)


def test_a_mistyped_site_is_named_before_anybody_is_asked(tmp_path: Path, hellos: dict[str, bytes]) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "sites.json").write_text(json.dumps(["site-1", "site-2", "site-5"]))
    note(tmp_path / REGISTERED, "site-3")  # provisioned later
    controller = greeted(make_plan("homlora"), tmp_path, hellos)
    with pytest.raises(UserError, match="unknown site 'site-4'; did you mean 'site-"):
        controller.collect_hellos()


# --- the site -----------------------------------------------------------------------------------------------


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_data(tmp_path, SITES[:1])
    return write_site_file(tmp_path / "kit" / "site.toml", tmp_path, SITES[0]).parent


def test_a_site_answers_and_its_filter_lets_it_pass(kit: Path) -> None:
    executor, context = executor_of(make_plan(sites=SITES[:1]), kit.parent), context_of(SITES[0], kit)
    reply = ask(executor, context, HELLO)
    assert AllowListFilter().process(reply, context) is reply
    assert decode(reply[BODY]).fields["kind"] == "hello"
    reply["more"] = "text"
    with pytest.raises(Malformed, match="'more'"):
        AllowListFilter().process(reply, context)


def test_a_site_writes_down_where_it_stands_for_itself(kit: Path) -> None:
    executor, context = executor_of(make_plan(sites=SITES[:1]), kit.parent), context_of(SITES[0], kit)
    sent = [len(ask(executor, context, HELLO)[BODY])]
    request = encode({"kind": "train", "round": 1})
    reply = ask(executor, context, request)
    told = decode(reply[BODY]).fields
    found = read_status(run_folder(kit.parent, "trial"))
    assert found is not None and (found.state, found.round, found.rounds) == ("running", 1, 3)
    assert found.loss == pytest.approx(told["loss"] / told["steps"]) and found.seconds
    assert (found.received, found.sent) == (len(HELLO) + len(request), sent[0] + len(reply[BODY]))
    text = exposition(Participant(kit.parent, SITES[0], False, 0.0))
    assert figures(text)['pf2lora_training_loss{run="trial"}'] == found.loss
    assert not private_words(text)
    ask(executor, context, encode({"kind": "train", "round": 9}))  # of a later round than it has a state for
    shutil.rmtree(kit.parent / "runs")
    (kit.parent / "runs").touch()
    assert decode(ask(executor, context, HELLO)[BODY]).kind == "hello", (
        "where nothing can be noted, it goes on"
    )


def test_before_a_site_is_set_up_it_can_only_tell_a_problem(kit: Path) -> None:
    context = context_of(SITES[0], kit)
    problem = Shareable({BODY: encode({"kind": "problem", "round": 1, "code": "data"})})
    assert AllowListFilter().process(problem, context) is problem
    for fields in ({"kind": "hello", "round": 1}, {"kind": "update", "round": 1, "steps": 1, "loss": 1.0}):
        with pytest.raises(Malformed, match="instead of problem"):
            AllowListFilter().process(Shareable({BODY: encode(fields)}), context)


def broken_data(kit: Path) -> str:
    (kit.parent / "train" / f"{SITES[0]}.jsonl").write_text("{")
    return "data"


def strange_label(kit: Path) -> str:
    rows = kit.parent / "train" / f"{SITES[0]}.jsonl"
    rows.write_text(rows.read_text() + json.dumps({"text": "unseen in training", "label": "so-so"}) + "\n")
    return "labels"


def no_folder(kit: Path) -> str:
    (kit.parent / "state").write_text("a file")
    return "unwritable"


@pytest.mark.parametrize("broken", [broken_data, strange_label, no_folder])
def test_a_sites_problem_is_a_code_to_the_server_and_a_line_at_home(
    kit: Path, broken: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    code = broken(kit)
    executor, context = executor_of(make_plan(sites=SITES[:1]), kit.parent), context_of(SITES[0], kit)
    for request in (HELLO, encode({"kind": "train", "round": 3})):
        number = decode(request).round
        reply = AllowListFilter().process(ask(executor, context, request), context)
        assert decode(reply[BODY]).fields == {"kind": "problem", "round": number, "code": code}
    assert "pf2lora: site-1: " in capfd.readouterr().err


def test_a_site_says_that_it_cannot_use_the_servers_message(kit: Path) -> None:
    import torch

    executor, context = executor_of(make_plan(sites=SITES[:1]), kit.parent), context_of(SITES[0], kit)
    ask(executor, context, HELLO)
    reply = ask(executor, context, encode({"kind": "train", "round": 1}, {"x": torch.zeros(2)}))
    assert decode(reply[BODY]).fields["code"] == "message"
    with pytest.raises(Malformed):  # FLARE tells the server that the task failed
        ask(executor, context, b"garbage")
