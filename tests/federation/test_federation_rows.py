"""A round's updates on disk: the merge is that of the whole matrix to the last bit, and memory is one block's."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_federation import SITES, Small, make_plan, make_small
from torch import Tensor

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from nvflare.apis.signal import Signal
from site_executor import controller_of

from pf2lora.core.method import Updates
from pf2lora.core.privacy import Mechanism, clipped
from pf2lora.federation.protocol import private, robust, rows
from pf2lora.federation.protocol.checkpoints import StateFolderError
from pf2lora.federation.protocol.rows import Rows
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.methods import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")
FEDERATED = [name for name, kind in METHODS.items() if kind.federated and not kind.pooled]
WHOLE = ("hetlora", "flexlora", "fedex-lora")  # whose servers look at every row


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few columns, of which an update has many."""
    monkeypatch.setattr(rows, "AT_ONCE", 400)
    monkeypatch.setattr(rows, "WIDTH", 16)


def filled(folder: Path, count: int, size: int = 5000, seed: int = 0) -> tuple[Rows, Tensor]:
    numbers = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    found = Rows(folder, [f"s{k}" for k in range(count)])
    for k in reversed(range(count)):  # whoever answers first
        found.put(f"s{k}", numbers[k])
    return found, numbers


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 64])
def test_blocks_give_the_numbers_of_the_whole_matrix(tmp_path: Path, count: int) -> None:
    found, numbers = filled(tmp_path, count)
    weights = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights /= weights.sum()
    assert len(list(found.blocks(found.names))) > 10
    assert torch.equal(found.part(found.names), numbers)
    average = found.merged(found.names, lambda block: weights.to(block) @ block)
    assert torch.equal(average, weights.to(numbers) @ numbers)
    for how in ("median", "trimmed"):
        assert torch.equal(
            found.merged(found.names, partial(robust.merged, how=how)), robust.merged(numbers, how)
        )
    cut = private.cut_sum(Mechanism(3.0, 1.0), found, found.names)
    assert torch.equal(cut, clipped(numbers, 3.0).sum(0))


@pytest.mark.parametrize("name", FEDERATED)
def test_a_server_that_averages_needs_the_mean_alone(name: str, tmp_path: Path) -> None:
    """Its merge of one row, the mean, is its merge of all; with who took part."""
    small = make_small(tmp_path, make_plan(name, config={"rounds": 1}))
    small.greet()
    method = small.coordinator.known_method
    assert method.needs_rows == (name in WHOLE)
    if method.needs_rows:
        return
    for number in (1, 2):
        numbers = torch.randn(3, method.leaves(number).size)
        weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        kept = method.first_server(torch.zeros(0))
        whole = method.merge(Updates(numbers, weights, (0, 2, 3), number), kept)
        mean = method.average(numbers, weights).unsqueeze(0)
        one = method.merge(Updates(mean, torch.ones(1, dtype=torch.float64), (0, 2, 3), number), kept)
        assert torch.equal(one[0], whole[0])


def common_of(small: Small) -> Tensor:
    assert small.coordinator.common is not None
    return small.coordinator.common


@pytest.mark.parametrize("method", ["pf2lora", "scaffold", "hetlora"])
def test_neither_order_nor_blocks_change_a_run(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(method, config={"weighting": "size"})
    plain = make_small(tmp_path / "plain", plan)
    plain.run()
    monkeypatch.setattr(rows, "AT_ONCE", 400)
    monkeypatch.setattr(rows, "WIDTH", 16)
    largest, part = [0], Rows.part

    def watched(self: Rows, names: Any, start: int = 0, stop: int | None = None) -> Tensor:
        found = part(self, names, start, stop)
        largest[0] = max(largest[0], found.numel())
        return found

    monkeypatch.setattr(Rows, "part", watched)
    other = make_small(tmp_path / "other", plan)
    other.greet()
    while not other.coordinator.over:
        answers = other.ask(other.coordinator.requests(list(SITES), set()))
        arrived = {s: other.coordinator.arrived(s, answers[s]) for s in reversed(SITES)}
        assert not any(isinstance(value, bytes) for answer in arrived.values() for value in answer)
        names = {file.name for file in (tmp_path / "other" / "server").iterdir()}
        assert all(
            name.endswith((".json", ".jsonl", ".safetensors")) for name in names
        )  # no update has a name on the disk
        other.coordinator.finish_round(arrived, 0.0, [])
        assert not other.coordinator.rows.there
    assert torch.equal(common_of(other), common_of(plain))
    whole = len(SITES) * other.coordinator.known_method.leaves(1).size
    assert largest[0] == (whole if method == "hetlora" else 384)


def test_sites_that_are_told_the_same_share_the_bytes(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("pf2lora"))
    small.greet()
    small.round()
    assert len({id(data) for data in small.coordinator.requests(list(SITES), set()).values()}) == 1


def test_a_full_disk_ends_the_round_in_the_runs_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("homlora")
    small = make_small(tmp_path / "small", plan)
    controller: Any = controller_of(plan, tmp_path)
    controller.session = ServerSession(plan, tmp_path / "run")
    controller.abort, controller.fl_ctx = Signal(), None
    for site, hello in small.ask(dict.fromkeys(SITES, small.coordinator.hello())).items():
        controller.session.register(site, hello)
    requests = controller.session.requests(list(SITES), set())
    delivered = {}

    def post(name: str, site: str, data: bytes, seconds: int, deliver: Any) -> Any:
        delivered[site] = deliver
        deliver(small.ask({site: data})[site])
        return SimpleNamespace(completion_status="done")

    controller.post = post
    take = controller.session.arrived
    found = controller.exchange("round", requests, timeout=5.0, take=take)
    assert list(found) == list(SITES) and all(not answer.why for answer in found.values())
    before = dict(found)
    delivered["site-1"](b"garbage")  # after the end
    assert found == before

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pf2lora.federation.protocol.rows.os.pwrite", full)
    with pytest.raises(StateFolderError, match="is full"):
        controller.exchange("round", requests, timeout=5.0, take=take)
