"""Foreign bytes: whatever a participant sends, the other end names it and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save
from small_federation import SITES, Small, make_plan, make_small

from pf2lora.engines.bad_clients import Diverged
from pf2lora.engines.helpers import HelperLost
from pf2lora.errors import UnknownLabel, UserError
from pf2lora.federation.protocol import messages, site_models
from pf2lora.federation.protocol.allow_list import read_request
from pf2lora.federation.protocol.checkpoints import StateFolderError
from pf2lora.federation.protocol.messages import (
    FIELDS,
    Malformed,
    decode,
    describe,
    encode,
    layout_from,
    to_tensors,
)
from pf2lora.federation.protocol.problems import PROBLEMS, problem_code
from pf2lora.federation.protocol.server import RoundRecord, ServerSession
from pf2lora.run.evaluation import Measured

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 400  # as a float it overflows


def raw(fields: str, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """A message whose fields are this very text."""
    return save(tensors or {}, metadata={FIELDS: fields})


def with_header(header: str) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode()


NO_MESSAGES: dict[str, Any] = {
    "nothing": b"",
    "text, not bytes": "hello",
    "none": None,
    "random": bytes(range(256)),
    "a length beyond the end": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "a header that is a list": with_header("[1]"),
    "a deep header": with_header(DEEP),
    "metadata that is a text": with_header('{"__metadata__":"x"}'),
    "no fields": save({}, metadata={"other": "{}"}),
    "more metadata": save({}, metadata={FIELDS: "{}", "other": "text"}),
    "deep fields": raw(DEEP),
    "a deep field": raw(f'{{"kind":"problem","round":1,"code":{DEEP}}}'),
    "fields that are a list": raw("[]"),
    "a key twice": raw('{"kind":"problem","round":1,"code":"a secret","code":"loss"}'),
    "no number": raw('{"kind":"update","round":1,"steps":1,"loss":NaN}'),
    "too many digits": raw(f'{{"kind":"update","round":{"9" * 5000}}}'),
}


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_one_printable_line(data: Any) -> None:
    with pytest.raises(Malformed) as caught:
        decode(data)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400


PROBLEM = '"kind":"problem","round":1'
UPDATE = '"kind":"update","round":1,"steps":2,"loss":0.5'
BAD_ANSWERS = {
    **{f"no message: {name}": data for name, data in NO_MESSAGES.items()},
    "no kind": raw('{"round":1}'),
    "a kind that is a list": raw('{"kind":[],"round":1}'),
    "a nested kind": raw(f'{{"kind":{"[" * 300}{"]" * 300}}}'),
    "a problem without its code": raw(f"{{{PROBLEM}}}"),
    "an unknown problem": raw(f'{{{PROBLEM},"code":"a patient is ill"}}'),
    "a list as code": raw(f'{{{PROBLEM},"code":[]}}'),
    "an object as code": raw(f'{{{PROBLEM},"code":{{}}}}'),
    "a problem with text": raw(f'{{{PROBLEM},"code":"loss","why":"\\ud800 text"}}'),
    "a problem with tensors": raw(f'{{{PROBLEM},"code":"loss"}}', {"x\n" * 500: torch.zeros(3)}),
    "a problem of another round": raw('{"kind":"problem","round":7,"code":"loss"}'),
    "scores instead of an update": raw('{"kind":"scores","round":1,"served":{"rows":2}}'),
    "a hello instead of an update": raw('{"kind":"hello","round":1}'),
    "no round": raw('{"kind":"update","steps":2,"loss":0.5}'),
    "true as round": raw('{"kind":"update","round":true,"steps":2,"loss":0.5}'),
    "a huge round": raw(f'{{"kind":"update","round":{HUGE},"steps":2,"loss":0.5}}'),
    "a huge loss": raw(f'{{"kind":"update","round":1,"steps":2,"loss":{HUGE}}}'),
    "an infinite loss": raw('{"kind":"update","round":1,"steps":2,"loss":1e999}'),
    "no steps": raw('{"kind":"update","round":1,"steps":0,"loss":0.5}'),
    "huge rows": raw(f'{{{UPDATE},"served":{{"rows":{HUGE}}}}}'),
    "a huge score": raw(f'{{{UPDATE},"served":{{"rows":2,"accuracy":{HUGE}}}}}'),
    "scores that are a list": raw(f'{{{UPDATE},"served":[1]}}'),
    "no tensors": raw(f"{{{UPDATE}}}"),
}


class Asked(NamedTuple):
    """A federation whose sites have answered round 1; the server has not looked at the answers yet."""

    small: Small
    answers: dict[str, bytes]

    def refused(self, data: Any) -> dict[str, str]:
        """Whom the server leaves out when site-3 says `data` instead of its answer."""
        read = self.small.coordinator.read(self.answers | {"site-3": data})
        return {site: answer.why for site, answer in read.items() if answer.why}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    small = make_small(tmp_path_factory.mktemp("asked"), make_plan("pf2lora"))
    small.greet()
    return Asked(small, small.ask(small.coordinator.requests(list(SITES), set())))


@pytest.mark.parametrize("data", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_bad_answer_leaves_out_its_site_alone(asked: Asked, data: Any) -> None:
    refused = asked.refused(data)
    assert set(refused) == {"site-3"} and refused["site-3"].isprintable()


def test_the_round_goes_on_with_the_others(small: Small) -> None:
    record = round_with(small, raw(f'{{{PROBLEM},"code":[]}}'))
    assert record["answered"] == ["site-1", "site-2", "site-4"] and set(record["refused"]) == {"site-3"}
    assert "site-3" not in record["scores"] and record["stopped"] == []
    for number, (code, stopped) in enumerate({"loss": [], "disk-full": ["site-3"]}.items(), 2):
        record = round_with(small, encode({"kind": "problem", "round": number, "code": code}))
        assert record["stopped"] == stopped and PROBLEMS[code] == record["refused"]["site-3"]


def round_with(small: Small, data: Any) -> RoundRecord:
    """A round in which site-3 says `data` instead of its answer."""
    small.tamper = lambda site, answer: data if site == "site-3" else answer
    return small.round()


@pytest.mark.parametrize("bad", ["0-d", "0-d all", "3-d", "rank 0", "bytes", "two ranks"])
def test_tensors_of_impossible_shapes_leave_out_their_site_alone(asked: Asked, bad: str) -> None:
    fields, tensors = decode(asked.answers["site-3"])
    first = min(name for name in tensors if name.endswith(".A"))
    if bad == "0-d":
        tensors[first] = torch.tensor(1.0)
    elif bad == "0-d all":
        tensors = {name: torch.tensor(1.0) for name in tensors}
    elif bad == "3-d":
        tensors[first] = tensors[first][None]
    elif bad == "rank 0":
        layout = asked.small.coordinator.layout
        tensors = to_tensors(layout, torch.zeros(layout.shared), 0, torch.float32)
    elif bad == "bytes":
        tensors[first] = tensors[first].to(torch.uint8)
    elif bad == "two ranks":
        tensors[first] = tensors[first][:1].contiguous()
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    assert set(asked.refused(encode(fields, tensors))) == {"site-3"}


def test_only_those_who_were_asked_to_train_can_change_x(tmp_path: Path) -> None:
    plan = make_plan("homlora", config={"participation": 0.5, "evaluate_every": 1, "rounds": 4})
    small = make_small(tmp_path, plan)
    small.greet()
    small.round()
    (asleep, *_) = (s for s in SITES if s not in small.coordinator.chosen(2))
    (awake, *_) = small.coordinator.chosen(2)
    taken: dict[str, bytes] = {}

    def tamper(site: str, answer: bytes) -> bytes:
        taken[site] = answer
        return taken[awake] if site == asleep else answer

    small.tamper = tamper
    answers = small.ask(small.coordinator.requests([awake, asleep, *SITES], {1, 2}))
    record = small.coordinator.finish_round(answers, 0.0, [])
    assert asleep in record["refused"] and asleep not in record["answered"]


def test_a_method_that_sends_nothing_takes_nothing(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("local"))
    small.greet()
    layout = small.setups["site-3"].layout
    tensors = {e.name: torch.zeros(e.shape) for e in layout.shared_entries}
    record = round_with(small, raw(f"{{{UPDATE}}}", tensors))
    assert set(record["refused"]) == {"site-3"} and small.coordinator.common is None


def test_a_bad_answer_at_the_end_is_noted(small: Small) -> None:
    small.coordinator.finish({"site-1": raw(f"{{{PROBLEM}}}"), "site-2": None})
    final = json.loads((small.root / "server" / "final.json").read_text())
    assert final["site-1"]["reason"] == "the field 'code' of a 'problem' message is missing"
    assert final["site-2"]["kind"] == "problem"


# --- hello --------------------------------------------------------------------------------------------------


BAD_FACTS: dict[str, dict[str, Any]] = {
    "a digest that is a text": {"model": "text"},
    "no training rows": {"train_rows": 0},
    "rows that are a text": {"train_rows": "12"},
    "a huge count": {"label_count": 10**400},
    "a version that is a list": {"version": []},
    "more than is declared": {"patients": 12},
    "a layout that is a text": {"layout": "A"},
    "a layout of numbers": {"layout": [1, 2]},
    "a short entry": {"layout": [["m", "A"]]},
    "an unknown kind": {"layout": [["m", "C", [2, 3], ""]]},
    "a shape that is a text": {"layout": [["m", "head", "23", ""]]},
    "a 0-d shape": {"layout": [["m", "head", [], "weight"]]},
    "a 3-d factor": {"layout": [["m", "A", [2, 3, 4], ""], ["m", "B", [3, 2], ""]]},
    "a negative shape": {"layout": [["m", "head", [-2, -3], "weight"]]},
    "a huge shape": {"layout": [["m", "head", [2**31, 2**31], "weight"]]},
    "A without B": {"layout": [["m", "A", [2, 3], ""]]},
    "A and B of two ranks": {"layout": [["m", "A", [2, 3], ""], ["m", "B", [3, 4], ""]]},
    "a name twice": {"layout": [["m", "head", [2], "w"], ["m", "head", [2], "w"]]},
    "a long name": {"layout": [["m" * 10_000, "head", [2], "w"]]},
}


@pytest.mark.parametrize("changes", BAD_FACTS.values(), ids=BAD_FACTS)
def test_a_hello_that_cannot_be_is_malformed(asked: Asked, tmp_path: Path, changes: dict[str, Any]) -> None:
    facts = {"kind": "hello", "round": 1} | asked.small.setups["site-3"].facts
    server = ServerSession(make_plan("hetlora"), tmp_path)
    with pytest.raises(Malformed) as caught:
        server.register("site-3", encode(facts | changes))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
    assert server.sites == {} and server.method is None
    server.register("site-3", encode(facts))
    assert set(server.sites) == {"site-3"}


GARBAGE = [
    *NO_MESSAGES.values(),
    raw(f"{{{PROBLEM}}}"),
    raw(f'{{{PROBLEM},"code":[]}}'),
    raw('{"kind":"hello"}'),
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_instead_of_a_hello_is_malformed(tmp_path: Path, data: Any) -> None:
    with pytest.raises(Malformed):
        ServerSession(make_plan(), tmp_path).register("site-3", data)


def test_a_problem_instead_of_a_hello_names_the_site_and_the_reason(tmp_path: Path) -> None:
    problem = encode({"kind": "problem", "round": 1, "code": "disk-full"})
    with pytest.raises(UserError, match=r"site-3 cannot take part: the disk of its state folder is full"):
        ServerSession(make_plan(), tmp_path).register("site-3", problem)


def test_a_layout_survives_its_description(asked: Asked) -> None:
    layout = asked.small.setups["site-1"].layout
    found = layout_from(json.loads(json.dumps(describe(layout))))
    assert found.entries == layout.shared_entries and found.shared == layout.shared


def test_each_end_decodes_a_message_once(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = small.coordinator.requests(list(SITES), set())
    decoded: list[object] = []
    views = messages.views

    def counted(data: bytes, start: int, header: Any) -> Any:
        decoded.append(data)
        return views(data, start, header)

    monkeypatch.setattr(messages, "views", counted)
    answers = {s: small.sessions[s].answer(read_request(request)) for s, request in requests.items()}
    assert decoded == list(requests.values())
    decoded.clear()
    small.coordinator.finish_round(answers, 0.0, [])
    assert decoded == list(answers.values())


# --- at the site --------------------------------------------------------------------------------------------


NO_REQUESTS = [
    *NO_MESSAGES.values(),
    raw('{"kind":"train"}'),
    raw('{"kind":"update","round":1,"steps":1,"loss":1}'),
    raw('{"kind":"train","round":0}'),
    raw('{"kind":"train","round":1,"run":"rm"}'),
    raw('{"kind":"train","round":1,"measure_before":"yes"}'),
    raw('{"kind":"hello","round":1}', {"x": torch.zeros(1)}),
]


@pytest.mark.parametrize("data", NO_REQUESTS, ids=range(len(NO_REQUESTS)))
def test_a_site_refuses_a_request_that_is_none(data: Any) -> None:
    with pytest.raises(Malformed):
        read_request(data)


def test_a_site_refuses_an_adapter_that_is_not_its_own(small: Small) -> None:
    request = encode({"kind": "train", "round": 2}, {"other.A": torch.zeros(2, 3)})
    with pytest.raises(Malformed, match=r"'other.A' is not part of the common adapter"):
        small.sessions["site-1"].answer(read_request(request))
    assert small.sessions["site-1"].folder.rounds() == []


def test_a_score_that_is_no_number_is_left_out(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    session = small.sessions["site-1"]
    scores = Measured({"loss": [float("nan")], "accuracy": [0.6], "matthews": [None]}, [])
    monkeypatch.setattr(site_models, "measure", lambda trial, models, final: scores)
    answer = session.answer(read_request(encode({"kind": "measure", "round": 1})))
    assert decode(answer).fields["served"] == {"rows": 20, "accuracy": 12.0}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StateFolderError("full", "disk-full"), "disk-full"),
        (Diverged("nan"), "loss"),
        (UnknownLabel("'so-so' is unseen"), "labels"),
        (Malformed("no"), "message"),
        (HelperLost("killed"), "processes"),
        (torch.OutOfMemoryError("full"), "memory"),
        (UserError("no such file"), "data"),
    ],
)
def test_every_error_has_its_code(error: Exception, code: str) -> None:
    assert problem_code(error) == code and code in PROBLEMS
