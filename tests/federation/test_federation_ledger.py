"""A site keeps to the plan's rounds by its ledger, whatever the server asks for and whatever was cleaned up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from masked_federation import make_masked, masked_plan
from small_federation import SITES, Small, changed, make_plan, make_small

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.allow_list import read_request
from pf2lora.federation.protocol.checkpoints import StateFolderError
from pf2lora.federation.protocol.ledger import FOLDER, Entry, read
from pf2lora.federation.protocol.messages import Message, to_tensors
from pf2lora.federation.protocol.names import check_name
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import PolicyBroken
from pf2lora.federation.protocol.problems import PROBLEMS, problem_fields, told
from pf2lora.federation.protocol.server import ServerSession

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

SITE = "site-1"


def asked(small: Small, kind: str, number: int, x: torch.Tensor | None = None) -> Message:
    """What a site answers to a server that asks for anything at all."""
    method = small.setups[SITE].method
    tensors = {} if x is None else to_tensors(method.arrives(number - 1), x, None, torch.float32)
    request = read_request(messages.encode({"kind": kind, "round": number}, tensors))
    return messages.decode(small.sessions[SITE].answer(request))


def started_again(small: Small, plan: Plan | None = None) -> Small:
    """Everybody, from what is on their disks."""
    for session in small.sessions.values():
        session.folder.close()
    return Small(plan or small.plan, small.root, small.files)


def cleaned(small: Small) -> None:
    """The sites' state of the run is deleted, but for what docs/operations.md says is kept."""
    for site in small.files:
        small.sessions[site].folder.close()
        folder = small.root / "state" / site / small.plan.name
        for path in [path for path in folder.iterdir() if path.name != "clients"]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def entry(small: Small) -> Entry:
    return read(small.root / "state" / SITE / FOLDER / f"{small.plan.name}.json")


# --- rounds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [False, True])
def test_after_its_end_a_run_trains_no_more(tmp_path: Path, clean: bool) -> None:
    """Neither the last round with some other x nor all of them once more; nothing is set aside for it."""
    small = make_small(tmp_path, make_plan("homlora", (SITE,), config={"rounds": 2}))
    small.run()
    x = small.coordinator.common
    assert x is not None
    for again in (small, None):
        if again is None and clean:
            cleaned(small)
        small = again or started_again(small)
        for number, other in ((2, x + 0.01), (2, None), (1, None)):
            with pytest.raises(StateFolderError, match="which this site has finished with round 2") as error:
                asked(small, "train", number, other)
            assert problem_fields(error.value) == {"code": "finished"}
    assert told({"code": "finished"}, small.plan) == PROBLEMS["finished"]
    assert not list((tmp_path / "state").rglob("aside"))
    assert entry(small).trainings == 2


def test_a_longer_plan_goes_on_after_the_end(tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:2], config={"rounds": 2})
    small = make_small(tmp_path / "twice", plan)
    small.run()
    longer = started_again(small, changed(plan, rounds=4))
    longer.run()
    at_once = make_small(tmp_path / "once", changed(plan, rounds=4))
    at_once.run()
    assert longer.coordinator.common is not None and at_once.coordinator.common is not None
    assert torch.equal(longer.coordinator.common, at_once.coordinator.common)
    assert entry(longer) == entry(at_once)
    shorter = started_again(longer, plan)  # the lead's earlier plan, which the server still has
    with pytest.raises(StateFolderError, match="finished with round 4"):
        asked(shorter, "train", 2)


@pytest.mark.parametrize("clean", [False, True])
def test_a_round_is_asked_for_again_as_often_as_the_site_allows(tmp_path: Path, clean: bool) -> None:
    """Starting the site again, or cleaning up, gives the server no more of them."""
    plan = make_plan("homlora", (SITE,), config={"rounds": 2})
    small = make_small(tmp_path, plan, {SITE: "max_repeats = 3\nmax_rounds = 2"})
    small.greet()
    small.round()
    x = small.coordinator.common
    assert x is not None
    for k in range(4):
        assert asked(small, "train", 2, x + 0.01 * k).kind == "update"
        if clean:
            cleaned(small)
        small = started_again(small)
    for number in (2, 1):
        with pytest.raises(PolicyBroken) as error:
            asked(small, "train", number, x if number > 1 else None)
    line = "its policy's max_repeats is 3, and the run has asked it to train so often beyond its rounds"
    assert str(error.value) == line == told(problem_fields(error.value), plan)
    assert entry(small).trainings == 5
    assert asked(small, "finish", 3, x).kind == "scores"  # the run's end is still its own


def test_the_rounds_of_a_site_are_those_in_which_the_plan_has_it(tmp_path: Path) -> None:
    plan = make_plan("homlora", SITES[:2], config={"rounds": 6, "participation": 0.5})
    small = make_small(tmp_path, plan, {SITE: "max_repeats = 0"})
    own = [number for number in range(1, 7) if SITE in plan.chosen(number)]
    assert small.setups[SITE].ledger.own_rounds == len(own) < 6
    small.run()
    assert entry(small).trainings == len(own)


def test_a_training_counts_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_small(tmp_path, make_plan("homlora", (SITE,)))

    def killed(*args: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(small.sessions[SITE], "train", killed)
        with pytest.raises(KeyboardInterrupt):
            asked(small, "train", 1)
    assert entry(small).trainings == 1
    with monkeypatch.context() as patch:
        patch.setattr(small.sessions[SITE].models, "deploy", killed)
        with pytest.raises(KeyboardInterrupt):
            asked(small, "finish", 2, torch.zeros(small.setups[SITE].method.arrives(1).size))
    assert entry(small).finished == 1


@pytest.mark.parametrize(
    "text", ["w1", "[]", "{}", '{"plan": {}, "trainings": "2", "summed": 0, "finished": 0}']
)
def test_a_damaged_ledger_is_one_line(tmp_path: Path, text: str) -> None:
    small = make_small(tmp_path, make_plan("homlora", (SITE,)))
    small.setups[SITE].ledger.file.write_text(text)
    with pytest.raises(StateFolderError, match=r"the ledger is damaged, put its backup there") as error:
        asked(small, "train", 1)
    assert problem_fields(error.value) == {"code": "state"}


def test_no_run_has_the_ledgers_name() -> None:
    with pytest.raises(UserError, match="run name"):
        check_name("run", FOLDER)


# --- sums ---------------------------------------------------------------------------------------------------


def new_server(small: Small, name: str) -> Small:
    """Sites that are started again, and a server that knows nothing, or says so."""
    small = started_again(small)
    small.coordinator = ServerSession(small.plan, small.root / name)
    small.greet()
    return small


def test_who_cleans_up_still_knows_what_was_summed(tmp_path: Path) -> None:
    """Else a second sum of the round, without site-4, would tell its update."""
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.run()
    cleaned(small)
    small = new_server(small, "another")
    record = small.round(["site-1", "site-2", "site-3"])
    assert record["refused"] == dict.fromkeys(SITES[:3], PROBLEMS["summed"])
    assert small.coordinator.common is None


@pytest.mark.parametrize(("kind", "repeated"), [("measure", 2), ("train", 3)])
def test_no_site_goes_back_behind_a_sum(tmp_path: Path, kind: str, repeated: int) -> None:
    """A server that had sites go back to round 2 would have updates that were summed, now without site-4, in the sum of
    round 4."""
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 4}))
    small.greet()
    commons = []
    for _ in range(3):
        small.round()
        assert small.coordinator.common is not None
        commons.append(small.coordinator.common)
    setup = small.setups["site-4"]
    saved = small.sessions["site-4"].folder.load(repeated, setup.initial).state
    (own,) = setup.method.send(saved, repeated)[1]
    x = to_tensors(setup.method.arrives(1), commons[0], None, torch.float32)
    request = read_request(messages.encode({"kind": kind, "round": 2}, x))
    answers = [messages.decode(session.answer(request)) for session in small.sessions.values()]
    small.coordinator.common = commons[repeated - 2]
    small.round(["site-1", "site-2", "site-3"])
    assert small.coordinator.common is not None
    guess = commons[repeated - 1] * len(SITES) - small.coordinator.common * 3
    assert (guess - own).abs().max() > 1e-3
    assert {answer.fields.get("code") for answer in answers} == {"summed"}


def test_a_longer_plan_after_cleaning_up_has_other_batches(tmp_path: Path) -> None:
    """The x of round 2 and a state that is gone would else make its updates again."""
    plan = masked_plan("homlora", config={"rounds": 1})
    small = make_masked(tmp_path, plan)
    small.run()
    cleaned(small)
    small = started_again(small, changed(plan, rounds=2))
    state, saved = small.sessions[SITE].received(2, {})
    assert (saved.round, saved.steps) == (0, 2) and torch.equal(state.x, small.setups[SITE].initial.x)
    assert small.round()["answered"] == list(SITES)
