"""Masked runs in which somebody cheats, or that cannot be: nothing is revealed, and the reason is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_federation import make_masked, masked_plan
from small_federation import SITES, make_plan, make_small

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.allow_list import AllowList
from pf2lora.federation.protocol.masked import context
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.stopping import QuorumMissed
from pf2lora.federation.protocol.wire import Wire

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = "it refused the round's masks or has lost them"


def tampered(kind: str, change: Callable[[dict[str, Any]], object]) -> Callable[[str, bytes], bytes]:
    """What site-2 sends of a kind is changed on its way."""

    def tamper(site: str, data: bytes) -> bytes:
        fields, tensors = messages.decode(data)
        if site != "site-2" or fields["kind"] != kind:
            return data
        change(fields)
        return messages.encode(fields, tensors)

    return tamper


UNREADABLE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("keys", lambda fields: fields["keys"].update(masking="zz")),
    ("keys", lambda fields: fields.update(kind="update")),
    ("keys", lambda fields: fields.update(round=7)),
    ("shares", lambda fields: fields["shares"].pop("site-1")),
]


@pytest.mark.parametrize(("kind", "change"), UNREADABLE)
def test_a_site_whose_message_is_wrong_is_left_out(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object]
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.tamper = tampered(kind, change)
    record = small.round()
    assert record["answered"] == ["site-1", "site-3", "site-4"]
    assert list(record["refused"]) == ["site-2"]


def test_keys_that_somebody_changed_on_the_way_stop_everybody(tmp_path: Path) -> None:
    """It may have been the server, who could then read along: no site masks anything for such keys."""
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.tamper = tampered("keys", lambda fields: fields["keys"].update(masking="00" * 32))
    with pytest.raises(QuorumMissed, match=f"site-4: {MASKS}"):
        small.round()
    assert {messages.decode(data).kind for _, data in small.messages} == {"hello", "keys", "problem"}


def test_shares_that_cannot_be_opened_cost_their_receivers_round(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.tamper = tampered("shares", lambda fields: fields["shares"].update({"site-1": "00" * 148}))
    record = small.round()
    assert record["refused"] == {"site-1": MASKS}
    assert record["answered"] == ["site-2", "site-3", "site-4"]


def test_a_server_without_masks_gets_no_keys(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora"))
    request = messages.Message({"kind": "keys", "round": 1}, {})
    with pytest.raises(Malformed, match="in a run without masks"):
        small.sessions["site-1"].answer(request)
    with pytest.raises(Malformed, match="a message of kind 'keys'"):
        AllowList(None, None, Wire()).check(messages.encode({"kind": "keys", "round": 1}))


def test_an_update_without_masks_does_not_leave_a_site(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora"))
    setup = small.setups["site-1"]
    own = messages.to_tensors(
        setup.method.leaves(1), setup.method.send(setup.initial, 1)[1][0], None, torch.float32
    )
    update = messages.encode({"kind": "update", "round": 1, "steps": 2, "loss": 1.0}, own)
    with pytest.raises(Malformed, match=r"is torch\.float32, not torch\.int64"):
        AllowList(setup.method, None, Wire(masked=True)).check(update)


def test_keys_are_of_a_run_and_a_round() -> None:
    plan = masked_plan()
    assert len({context(plan, 1), context(plan, 2), context(masked_plan(config={"lr": 0.5}), 1)}) == 3
    assert context(plan, 1) == context(masked_plan(deadline=5.0), 1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"wire": "bfloat16"}, "masked updates travel as whole numbers"),
        ({"config": {"weighting": "size"}}, "it must be 'uniform'"),
        ({"sites": SITES[:2]}, "a masked run has 3 sites or more"),
    ],
)
def test_what_masks_do_not_fit_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        masked_plan("homlora", **changes)
    with pytest.raises(UserError, match="sends nothing"):
        masked_plan("local")


def test_a_site_says_how_many_a_sum_must_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its policy's min_sites is 5, and the run's sites a round are 4"):
        make_masked(tmp_path, masked_plan("homlora"), "min_sites = 5\n")
    small = make_masked(tmp_path / "four", masked_plan("homlora"), "min_sites = 4\nmasked = true\n")
    small.greet()
    with pytest.raises(QuorumMissed, match=f"site-1: {MASKS}"):
        small.round(["site-1", "site-2", "site-3"])
