"""Updates that would pull the average somewhere else: found beside the others', bounded, or merged robustly."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import SITES, Small, make_plan, make_small
from torch import Tensor

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.robust import merged
from pf2lora.federation.protocol.rows import Rows
from pf2lora.federation.protocol.update_checks import bounded, figures_of, odd_updates, starts

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

BAD = "site-2"
Change = Callable[[Tensor], Tensor]


def poisoned(change: Change) -> Callable[[str, bytes], bytes]:
    """What the bad site sends, changed tensor by tensor."""

    def tamper(site: str, data: bytes) -> bytes:
        fields, tensors = messages.decode(data)
        if site != BAD or fields["kind"] != "update":
            return data
        return messages.encode(fields, {name: change(t).contiguous() for name, t in tensors.items()})

    return tamper


def after(small: Small, rounds: int) -> Small:
    small.greet()
    for _ in range(rounds):
        assert small.round()["refused"] == {}  # honest sites, whose rows differ, are taken
    return small


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("method", ["pf2lora", "homlora"])
def test_minus_nine_times_x_is_refused(tmp_path: Path, method: str, rounds: int) -> None:
    """It passes a limit on the norm of what is sent; not one on its change."""
    small = after(make_small(tmp_path, make_plan(method)), rounds)
    small.tamper = poisoned(lambda tensor: -9 * tensor)
    record = small.round()
    assert list(record["refused"]) == [BAD] and record["take_back"] == [BAD]
    assert "its change" in record["refused"][BAD] and "not their way" in record["refused"][BAD]
    assert record["answered"] == ["site-1", "site-3", "site-4"]


def test_a_truncated_update_is_none_of_a_method_that_does_not_truncate(tmp_path: Path) -> None:
    small = after(make_small(tmp_path, make_plan("pf2lora")), 0)

    def rank_one(site: str, data: bytes) -> bytes:
        fields, tensors = messages.decode(data)
        if site != BAD or fields["kind"] != "update":
            return data
        layout = small.setups[site].method.leaves(1)
        flat = messages.to_flat(layout, tensors)
        return messages.encode(fields, messages.to_tensors(layout, flat, 1, torch.float32))

    small.tamper = rank_one
    assert "has shape" in small.round()["refused"][BAD]


# --- beside the others --------------------------------------------------------------------------------------


def changes(*rows: list[float], start: float = 10.0) -> dict[str, str]:
    """What is refused of these changes, of sites that began with a vector of this length."""
    begun = torch.tensor([0.0, 0.0, 0.0, start])
    sent = rows_of([begun + torch.tensor([*row, 0.0]) for row in rows])
    return odd_updates(sent, dict.fromkeys(sent.names, begun), 10.0)


def rows_of(vectors: Iterable[Tensor]) -> Rows:
    """A round's updates, by s0, s1, …"""
    sent = {f"s{i}": vector for i, vector in enumerate(vectors)}
    rows = Rows(Path(tempfile.gettempdir()), list(sent))
    for site, vector in sent.items():
        rows.put(site, vector)
    return rows


HONEST = [[1.0, 0.2, 0.0], [1.0, -0.3, 0.1], [0.9, 0.0, -0.3]]


def test_a_change_against_others_who_agree_is_refused() -> None:
    refused = changes(*HONEST, [-1.0, 0.1, 0.0])
    assert list(refused) == ["s3"] and "goes against the others', who agree (cosine -0.9" in refused["s3"]


def test_sites_that_do_not_agree_are_all_taken() -> None:
    assert changes([1.0, 0.0, 0.0], [-1.0, 0.2, 0.0], [0.0, 1.0, 0.0], [0.1, -1.0, 0.5]) == {}
    assert (
        changes([1.0, 0.0, 0.0], [1.0, 0.1, 0.0], [-1.0, 0.0, 0.0]) == {}
    )  # two are not yet others who agree


def test_a_site_that_was_away_may_move_far_the_others_way() -> None:
    small = [[value / 100 for value in row] for row in HONEST]
    assert changes(*small, [2.0, 0.5, 0.0]) == {}
    assert list(changes(*small, [-2.0, 0.5, 0.0])) == ["s3"]
    assert list(changes(*small, [11.0, 0.0, 0.0])) == ["s3"]  # farther than its start is long


def test_sites_that_did_not_move_are_taken() -> None:
    assert changes(*[[0.0] * 3] * 4) == {}
    assert list(changes(*[[0.0] * 3] * 3, [-20.0, 0.0, 0.0])) == ["s3"]


def test_two_updates_are_not_judged() -> None:
    assert changes([1.0, 0.0, 0.0], [-500.0, 0.0, 0.0]) == {}


def test_figures_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, begun = torch.randn(5, 1000), torch.randn(5, 1000)
    begun[:, 100:300] = torch.nan
    filled = torch.where(begun.isnan(), rows.median(0).values, begun).double()
    moved = rows.double() - filled
    monkeypatch.setattr("pf2lora.federation.protocol.rows.AT_ONCE", 35)
    monkeypatch.setattr("pf2lora.federation.protocol.rows.WIDTH", 7)
    sent = rows_of(rows)
    assert len(list(sent.blocks(sent.names))) == 143
    found = figures_of(sent, dict(zip(sent.names, begun)))
    torch.testing.assert_close(found.changes, moved.norm(dim=1))
    torch.testing.assert_close(found.begun, filled.norm(dim=1))
    torch.testing.assert_close(found.sent, rows.double().norm(dim=1))
    unit = moved / moved.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.cosines, unit @ unit.T)


@pytest.mark.parametrize("method", ["pf2lora", "hetlora", "rolora", "scaffold", "fedsa-lora"])
def test_the_server_knows_what_sites_began_with(tmp_path: Path, method: str) -> None:
    small = after(make_small(tmp_path, make_plan(method)), 2)
    session = small.coordinator
    found = starts(session, SITES)
    leaves = session.known_method.leaves(3)
    served = session.common_for(SITES[1])
    known = [e for e in leaves.entries if e.name in served]
    assert known
    for entry in known:
        at = leaves.offsets[entry.name]
        begun = found[SITES[1]][at : at + entry.size].view(entry.shape)
        assert torch.equal(messages.cut(begun, tuple(served[entry.name].shape)), served[entry.name])


# --- weights ------------------------------------------------------------------------------------------------


def test_no_site_weighs_more_than_ten_medians() -> None:
    assert bounded({"a": 40, "b": 50, "c": 2**52}) == {"a": 40, "b": 50, "c": 500}
    assert bounded({"a": 40, "b": 2**52}) == {"a": 40, "b": 400}
    assert bounded({"a": 40, "b": 50, "c": 60}) == {"a": 40, "b": 50, "c": 60}


def many_rows(site: str, data: bytes) -> bytes:
    fields, tensors = messages.decode(data)
    more = {"train_rows": 2**52} if site == BAD and fields["kind"] == "hello" else {}
    return messages.encode(fields | more, tensors)


def test_rows_that_nobody_has_do_not_take_the_average(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", config={"weighting": "size", "rounds": 1}))
    small.tamper = many_rows
    small.greet()
    small.round()
    sent = {}
    for site, data in small.messages:
        message = messages.decode(data)
        if message.kind == "update":
            sent[site] = messages.to_flat(small.coordinator.known_method.leaves(1), message.tensors)
    weights = {"site-1": 40, "site-2": 600, "site-3": 60, "site-4": 70}
    expected = sum((sent[s].double() * w for s, w in weights.items()), torch.zeros(())) / sum(
        weights.values()
    )
    assert small.coordinator.common is not None
    assert (small.coordinator.common - expected).abs().max() <= 1e-6


def test_a_site_does_not_change_its_weight_in_a_run(tmp_path: Path) -> None:
    small = after(make_small(tmp_path, make_plan("homlora", config={"weighting": "size"})), 1)
    hello = small.sessions[BAD].answer(messages.Message({"kind": "hello", "round": 2}, {}))
    small.coordinator.register(BAD, hello)
    with pytest.raises(
        UserError, match="site-2 has 4503599627370496 training rows and had 50 when the run began"
    ):
        small.coordinator.register(BAD, many_rows(BAD, hello))
    small.start_server()
    with pytest.raises(UserError, match="and had 50 when the run began"):
        small.coordinator.register(BAD, many_rows(BAD, hello))


# --- robust merges ------------------------------------------------------------------------------------------


def test_the_median_and_the_trimmed_mean_of_each_number() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, 1.0], [30.0, 2.0], [4.0, 3.0]])
    assert merged(rows, "median").tolist() == [3.0, 2.5]
    assert merged(rows, "trimmed").tolist() == [3.0, 2.5]
    assert merged(rows[:3], "median").tolist() == [2.0, 2.0]
    assert merged(rows[:2], "trimmed").tolist() == [1.5, 5.0]
    ten = torch.arange(10.0).unsqueeze(1) ** 2
    assert merged(ten, "trimmed").tolist() == [sum(i * i for i in range(2, 8)) / 6]


@pytest.mark.parametrize("how", ["median", "trimmed"])
@pytest.mark.parametrize("method", ["pf2lora", "fedadam", "rolora"])
def test_a_robust_merge_is_of_what_was_sent(tmp_path: Path, how: str, method: str) -> None:
    small = make_small(tmp_path, make_plan(method, merge=how, config={"rounds": 2}))
    small.run()
    assert small.coordinator.done == 2 and small.coordinator.common is not None
    if method != "pf2lora":
        return
    sent = [messages.decode(data) for _, data in small.messages]
    layout = small.coordinator.known_method.leaves(2)
    rows = torch.stack(
        [messages.to_flat(layout, m.tensors) for m in sent if m.kind == "update" and m.round == 2]
    )
    torch.testing.assert_close(small.coordinator.common, merged(rows, how).float(), rtol=0, atol=0)


def test_one_site_cannot_pull_a_median_out_of_the_others(tmp_path: Path) -> None:
    """A change that passes every check, as far as one may go: the mean follows it, the median does not."""
    commons = {}
    for how in ("mean", "median"):
        small = make_small(
            tmp_path / how, make_plan("homlora", merge=how, norm_limit=1e6, config={"rounds": 1})
        )
        small.tamper = poisoned(lambda tensor: tensor + 5)
        small.greet()
        assert small.round()["refused"] == {}
        assert small.coordinator.common is not None
        commons[how] = small.coordinator.common
    assert float((commons["mean"] - commons["median"]).median()) == pytest.approx(1.25, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"merge": "medain"}, "unknown merge 'medain'"),
        ({"merge": "median", "masked": True}, "of a masked round the server knows the sum alone"),
        ({"merge": "median", "config": {"dp_noise": 1.0}}, "differential privacy puts its noise on the mean"),
        ({"merge": "trimmed", "config": {"weighting": "size"}}, "weighting must be 'uniform'"),
        ({"merge": "median", "method": "hetlora"}, "the server of hetlora does not average"),
        ({"merge": "median", "method": "scaffold"}, "the server of scaffold does not average"),
        ({"merge": "median", "method": "local"}, "the server of local does not average"),
    ],
)
def test_what_a_robust_merge_does_not_fit_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        make_plan(**({"method": "homlora"} | changes))
