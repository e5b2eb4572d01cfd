"""What the server keeps of a run's rounds: bounded by what sites may say, beside the checkpoint, whole after a
crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import SITES, Small, make_plan, make_small

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages, server_checkpoint
from pf2lora.federation.protocol.allow_list import METRICS, AllowList
from pf2lora.federation.protocol.messages import LONGEST_HEADER, Malformed, decode, encode
from pf2lora.federation.protocol.records import RECORDS
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.wire import Wire

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


def with_scores(data: bytes, scores: dict[str, Any]) -> bytes:
    """An update that was measured so."""
    message = decode(data)
    return encode(message.fields | {"served": {"rows": 9} | scores}, message.tensors)


def test_the_server_takes_the_tasks_own_scores_alone(small: Small) -> None:
    update = small.ask(small.coordinator.requests(["site-1"], set()))["site-1"]
    own = dict.fromkeys(small.setups["site-1"].trial.workload.task.metrics, 1.0)
    assert small.coordinator.arrived("site-1", with_scores(update, own)).why == ""
    for other in ({"accuracy2": 1.0}, {f"m{i}": 1.0 for i in range(200_000)}):
        assert "'served'" in small.coordinator.arrived("site-1", with_scores(update, own | other)).why


def test_of_a_task_of_another_package_a_few_scores_of_any_name_will_do(small: Small) -> None:
    allowed = AllowList(small.coordinator.known_method, None, Wire())
    update = small.ask(small.coordinator.requests(["site-1"], set()))["site-1"]
    allowed.check(with_scores(update, {f"m{i}": 1.0 for i in range(METRICS)}))
    with pytest.raises(Malformed, match="'served'"):
        allowed.check(with_scores(update, {f"m{i}": 1.0 for i in range(METRICS + 1)}))


def test_a_message_is_no_longer_than_one_can_be(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    session = small.coordinator
    longest = session.allow_list(session.known_method).largest
    assert "bytes, of which there are" in session.arrived("site-1", bytes(longest + 1)).why
    with pytest.raises(Malformed, match="its header has 16777217 bytes"):
        decode((LONGEST_HEADER + 1).to_bytes(8, "little"))
    with pytest.raises(Malformed, match="at most"):  # nobody knows yet what an adapter looks like
        session.register("site-1", bytes(LONGEST_HEADER + 1))
    monkeypatch.setattr(messages, "strict_json", lambda text: pytest.fail("it was read"))
    assert session.arrived("site-1", bytes(longest + 1)).why


def test_a_checkpoint_does_not_grow_with_the_rounds(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", config={"rounds": 6}))
    small.greet()
    sizes = []
    for _ in range(6):
        small.round()
        path = server_checkpoint.newest(tmp_path / "server")
        assert path is not None
        sizes.append(path.stat().st_size)
    assert max(sizes) - min(sizes) <= 8  # the digits of a time
    assert path is not None
    header = server_checkpoint.read(path)[0]
    assert header.sites == small.coordinator.sites and all("layout" not in f for f in header.facts.values())
    lines = (tmp_path / "server" / RECORDS).read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 7))
    assert list(ServerSession(small.plan, tmp_path / "server").records) == [json.loads(x) for x in lines]


class Crash(Exception):
    """The server's process ends here."""


@pytest.mark.parametrize("left", ["", "half of a li", "a whole line\n"])
def test_what_a_crash_leaves_behind_a_checkpoint_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    plan = make_plan("homlora")
    straight = make_small(tmp_path / "straight", plan)
    straight.run()
    broken = make_small(tmp_path / "broken", plan)
    broken.greet()
    broken.round()

    def crash(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(server_checkpoint, "write", crash)
        with pytest.raises(Crash):
            broken.round()
    file = tmp_path / "broken" / "server" / RECORDS
    assert len(file.read_text().splitlines()) == 2  # round 2 is recorded, and was not saved
    with file.open("a") as more:
        more.write(left)
    broken.start_server()
    assert broken.coordinator.done == len(broken.coordinator.records) == 1
    for session in broken.sessions.values():
        session.folder.close()
    broken.sessions = {site: broken.start_site(site) for site in SITES}
    broken.run()
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert torch.equal(broken.coordinator.common, straight.coordinator.common)  # type: ignore[arg-type]
    assert broken.coordinator.records.losses == straight.coordinator.records.losses


@pytest.mark.parametrize("content", [None, "", "{}\n{}\n{}\n", "no JSON\n"])
def test_a_checkpoint_without_its_records_is_one_line(tmp_path: Path, content: str | None) -> None:
    small = make_small(tmp_path, make_plan("homlora"))
    small.run()
    file = tmp_path / "server" / RECORDS
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(
        UserError, match=r"round-000003.safetensors: damaged \(.*records.jsonl has .*remove it"
    ):
        small.start_server()
