"""A federation that something happens to: lost rounds, absent sites, full disks, sites that do not fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import (
    LABELS,
    SITES,
    Small,
    changed,
    make_plan,
    make_small,
    write_model,
    write_site_file,
)

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.allow_list import read_request
from pf2lora.federation.protocol.checkpoints import CheckpointFolder, StateFolderError
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.problems import PROBLEMS, problem_code
from pf2lora.federation.protocol.run_status import read_final
from pf2lora.federation.protocol.server import ServerSession

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


# --- faults -------------------------------------------------------------------------------------------------


def test_a_server_that_lost_a_round_takes_the_sites_back_with_it(tmp_path: Path) -> None:
    """The site has saved round 2, the server only round 1: both go on from round 1, as if nothing had been."""
    plan = make_plan("pf2lora")
    straight = make_small(tmp_path / "straight", plan)
    straight.run()
    broken = make_small(tmp_path / "broken", plan)
    broken.greet()
    broken.round()
    broken.ask(
        broken.coordinator.requests(list(SITES), set())
    )  # round 2 is trained and saved; its answers are lost
    assert broken.sessions["site-1"].folder.rounds() == [1, 2]
    for session in broken.sessions.values():
        session.folder.close()
    broken.start_server()
    assert broken.coordinator.done == 1
    broken.sessions = {site: broken.start_site(site) for site in SITES}
    broken.run()
    assert torch.equal(broken.coordinator.common, straight.coordinator.common)  # type: ignore[arg-type]


def backup(small: Small) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (small.root / "server").glob("*") if file.is_file()}


def restored_from(small: Small, files: dict[str, bytes]) -> None:
    """The server has its files of an earlier time; everybody is started again."""
    for file in (small.root / "server").glob("round-*"):
        file.unlink()
    for name, data in files.items():
        (small.root / "server" / name).write_bytes(data)
    for session in small.sessions.values():
        session.folder.close()
    small.start_server()
    small.sessions = {site: small.start_site(site) for site in small.files}
    small.greet()


def old_server(root: Path, behind: int) -> tuple[Small, dict[str, dict[str, bytes]]]:
    """A federation whose server was restored from a backup of so many rounds ago, and the states before that."""
    small = make_small(root, make_plan("pf2lora", config={"rounds": 8}))
    small.greet()
    files: dict[str, bytes] = {}
    for number in range(1, 7):
        small.round()
        files = backup(small) if number == 6 - behind else files
    states = {
        site: {p.name: p.read_bytes() for p in session.folder.folder.glob("round-*")}
        for site, session in small.sessions.items()
    }
    restored_from(small, files)
    return small, states


def test_a_server_from_an_old_backup_is_refused_at_both_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    small, states = old_server(tmp_path, behind=4)
    assert small.coordinator.done == 2
    (request,) = small.coordinator.requests(["site-1"], set()).values()
    with pytest.raises(
        StateFolderError, match=r"asks for round 3, .* has done round 6: .*older backup"
    ) as told:
        small.sessions["site-1"].answer(read_request(request))
    assert problem_code(told.value) == "ahead" and "older backup" in PROBLEMS["ahead"]
    folder = small.sessions["site-1"].folder
    assert {p.name: p.read_bytes() for p in folder.folder.glob("round-*")} == states["site-1"]


def test_a_site_may_go_on_with_its_newest_adapter(tmp_path: Path) -> None:
    small, states = old_server(tmp_path, behind=4)
    for session in small.sessions.values():
        assert session.folder.keep_newest() == 6
    small.round()
    for site, session in small.sessions.items():
        assert session.latest is not None
        assert (session.latest.round, session.latest.steps) == (3, 14)  # seven rounds' steps, not one's
        assert int(session.latest.state.opt.step[0]) == 14
        kept = {p.name: p.read_bytes() for p in session.folder.folder.rglob("aside/*/round-*")}
        assert kept == states[site]
    while not small.coordinator.over:
        small.round()
    assert [r["round"] for r in small.coordinator.records] == list(range(1, 9))


def test_a_server_a_little_behind_gets_exactly_the_states_of_then(tmp_path: Path) -> None:
    small, states = old_server(tmp_path / "old", behind=2)  # the states of rounds 4 to 6 are kept
    straight = make_small(tmp_path / "straight", small.plan)
    straight.run()
    while not small.coordinator.over:
        small.round()
    assert torch.equal(small.coordinator.common, straight.coordinator.common)  # type: ignore[arg-type]
    aside = {p.name for p in small.sessions["site-2"].folder.folder.rglob("aside/*/round-*")}
    assert aside == {"round-000005.safetensors", "round-000006.safetensors"} < states["site-2"].keys()


def test_a_run_is_resumed_with_its_own_plan_only(tmp_path: Path) -> None:
    plan = make_plan("homlora")
    make_small(tmp_path, plan).run()
    longer = replace(changed(plan, rounds=5), deadline=9)
    assert ServerSession(longer, tmp_path / "server").done == 3
    for other in (changed(plan, lr=1.0), replace(plan, sites=SITES[:3])):
        with pytest.raises(UserError, match=r"the run .trial. exists with another (config|sites)"):
            ServerSession(other, tmp_path / "server")


def test_a_site_that_was_away_returns_with_its_own_state(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("pf2lora", config={"rounds": 4}))
    small.greet()
    small.round()
    before = small.sessions["site-2"].latest
    record = small.round(["site-1", "site-3", "site-4"])
    assert record["missing"] == ["site-2"]
    small.sessions["site-2"].latest = None  # a new process
    small.round()
    after = small.sessions["site-2"].latest
    assert before is not None and after is not None
    assert (after.round, after.steps) == (3, 4)
    assert int(after.state.opt.step[0]) == 4  # its own steps, not the federation's


def test_a_site_that_was_away_at_the_end_gets_its_last_x_later(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("pf2lora"))
    small.greet()
    small.round()
    while not small.coordinator.over:
        small.round(["site-1", "site-3", "site-4"])
    assert small.coordinator.unserved() == list(SITES)
    there = ["site-1", "site-3", "site-4"]
    small.coordinator.finish(small.ask(small.coordinator.finish_requests(there)))
    assert small.coordinator.unserved() == ["site-2"]
    before = read_final(tmp_path / "server")
    small.start_server()  # a later job
    assert small.coordinator.over and small.coordinator.unserved() == ["site-2"]
    small.greet()
    requests = small.coordinator.finish_requests(list(SITES))
    assert list(requests) == ["site-2"]
    small.coordinator.finish(small.ask(requests))
    assert small.coordinator.unserved() == []
    assert read_final(tmp_path / "server").items() > before.items()
    exported = small.sessions["site-2"].folder.folder / "clients" / "site-2"
    assert (exported / "adapter_model.safetensors").is_file()


def test_states_are_kept_for_a_few_rounds_only(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", config={"rounds": 6}))
    small.run()
    assert small.sessions["site-1"].folder.rounds() == [4, 5, 6]
    assert len(list((tmp_path / "server").glob("round-*.safetensors"))) == 2


def test_a_full_disk_stops_the_site_with_one_line(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    request = small.coordinator.requests(["site-1"], set())["site-1"]
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StateFolderError, match="is full") as caught:
        small.sessions["site-1"].answer(read_request(request))
    assert caught.value.code == "disk-full"
    assert small.sessions["site-1"].folder.rounds() == []
    assert not list(small.sessions["site-1"].folder.folder.glob("*.partial"))


def test_an_unusable_state_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFolderError, match="cannot be written") as caught:
        CheckpointFolder(tmp_path / "file" / "state", "trial").open()
    assert caught.value.code == "unwritable"
    first = CheckpointFolder(tmp_path / "state", "trial")
    first.open()
    with pytest.raises(StateFolderError, match="in use by another process"):
        CheckpointFolder(tmp_path / "state", "trial").open()


# --- what does not fit together -----------------------------------------------------------------------------


def test_another_base_model_is_named_before_round_1(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora"))
    other = write_model(tmp_path / "other", seed=1)
    write_site_file(small.files["site-3"], tmp_path, "site-3", model=other)
    with pytest.raises(UserError, match="site-3 has another base model than site-1"):
        Small(small.plan, tmp_path / "again", fresh(tmp_path, small)).greet()


def fresh(root: Path, small: Small) -> dict[str, Path]:
    """The same site files, with state folders that nobody has locked."""
    files = {}
    for site, file in small.files.items():
        text = file.read_text().replace(str(root / "state"), str(root / "state-again"))
        file.write_text(text)
        files[site] = file
    return files


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("labels", "0" * 64, "site-2 has other labels than site-1"),
        ("version", "9.9", "site-2 runs pf2lora 9.9"),
        ("engine", "2.8.0", "site-2 runs nvflare 2.8.0"),
        ("layout", [], "site-2's common adapter"),
    ],
)
def test_sites_that_do_not_fit_are_named(small: Small, key: str, value: Any, line: str) -> None:
    facts = {"kind": "hello", "round": 1} | small.setups["site-2"].facts | {key: value}
    with pytest.raises(UserError, match=line):
        small.coordinator.register("site-2", messages.encode(facts))


def test_a_label_that_nobody_named_is_the_sites_own_error(tmp_path: Path) -> None:
    make_small(tmp_path, make_plan("homlora"))
    plan = replace(make_plan("homlora"), labels=("neg", "other"))
    with pytest.raises(UserError, match="'pos' is unseen"):
        make_small(tmp_path, plan)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sites": ("a", "b", "a")}, "two sites are called 'a'"),
        ({"sites": ("a", "b/c")}, "site name 'b/c'"),
        ({"sites": ()}, "at least one site"),
        ({"deadline": 0}, "deadline is 0"),
        ({"quorum": 1.5}, "quorum is 1.5"),
        ({"norm_limit": 1.0}, "norm_limit is 1.0"),
        ({"wire": "int4"}, "wire is 'int4'"),
        ({"method": "centralized"}, r"no federation; run it with `pf2lora train`"),
        ({"method": "centralised"}, "did you mean 'centralized'"),
        ({"sites": ("a", "b.c")}, "site name 'b.c'"),
        ({"sites": ("a", "Server")}, "taken by the federation itself"),
        ({"name": "my run"}, "run name 'my run'"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(changes: dict[str, Any], line: str) -> None:
    values = {
        "name": "trial",
        "config": {},
        "method": "pf2lora",
        "sites": ("a", "b"),
        "labels": LABELS,
    } | changes
    with pytest.raises(UserError, match=line):
        Plan(**values)


def test_a_plan_survives_its_journey() -> None:
    plan = make_plan("hetlora", deadline=5, wire="bfloat16")
    assert Plan.from_json(plan.to_json()) == plan
