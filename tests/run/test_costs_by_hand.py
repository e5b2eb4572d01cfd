"""The parts of a run's costs, each from numbers that are easy to add up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import regression_problem, tiny_data

from pf2lora.adapters.first_state import factor_entries
from pf2lora.core.layout import Layout
from pf2lora.engines.batches import EncodedSource
from pf2lora.engines.steps import Step
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.local import Local
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.run import costs
from pf2lora.run.costs import Sent, StepLedger, few_lengths, powers, sent_bytes, shortest
from pf2lora.run.result import Parameters, SentBytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
P = regression_problem()  # two maps R^6 -> R^5 of rank 4, a head of 5 numbers
PER_RANK, HEAD = 2 * (6 + 5), 5


def test_parameters_are_means_over_clients_with_y_and_the_head_apart() -> None:
    y = Layout(tuple(factor_entries({"w0": (5, 6), "w1": (5, 6)}, "C", "D", 2)), 0)
    method = HetLoRA(P.layout, ranks=(1, 2, 4))
    found = costs.parameters(method, y, method.init(P.x, P.y))
    assert found.common == pytest.approx(PER_RANK * 7 / 3)
    assert (found.client, found.head) == (2 * PER_RANK, HEAD)
    whole = HomLoRA(P.layout)
    assert costs.parameters(whole, Layout((), 0), whole.init(P.x, P.y)) == Parameters(4 * PER_RANK, 0, HEAD)


def test_bytes_are_four_for_each_number_with_a_shared_head_apart() -> None:
    shared = HomLoRA(P.layout)
    assert shared.leaves(1).head_size == HEAD
    assert sent_bytes(Sent(285, 3, 3 * HEAD)) == SentBytes(4 * (95 - HEAD), 4 * HEAD)
    at_home = HomLoRA(Layout(P.layout.entries, P.layout.adapter_size))  # a head of its own does not leave
    assert at_home.sent_numbers(at_home.init(P.x, P.y), 1) == [4 * PER_RANK] * 3
    assert at_home.leaves(1).head_size == Local(P.layout).leaves(1).size == 0
    assert sent_bytes(Sent(170, 2)) == SentBytes(4 * 85, 0)
    for nothing in (Sent(), Sent(0, 2)):
        assert sent_bytes(nothing) == SentBytes(0, 0)
    method = HetLoRA(P.layout, ranks=(1, 2, 4))
    numbers = method.sent_numbers(method.init(P.x, P.y), 1)
    assert numbers == [PER_RANK * rank + HEAD for rank in (1, 2, 4)]
    assert sent_bytes(Sent(sum(numbers), 3, 3 * HEAD)).adapter == pytest.approx(4 * PER_RANK * 7 / 3)


# ---- operations ----


def test_a_ledger_adds_up_client_steps_by_method_and_lengths() -> None:
    one, other = HomLoRA(P.layout), HomLoRA(P.layout, lr=0.5)
    ledger = StepLedger()
    for step in (Step(one, 3, (8,)), Step(one, 2, (8,)), Step(one, 1, (9,)), Step(other, 4, (8,))):
        ledger.add(step)
    assert ledger.steps == {one: {(8,): 5, (9,): 1}, other: {(8,): 4}}


def test_a_runs_operations_are_the_sum_over_its_client_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step's operations are a polynomial of degree two in its batches' lengths, the sum is exact, from five of
    them for two batches, however many lengths occurred; each counted with one client, on the device."""
    counted: list[tuple[int, ...]] = []

    def operations(method: Any, lengths: Sequence[int]) -> float:
        inner, outer = lengths
        base = 1e6 if method.lr == 0.5 else 3e6
        return base + 700.0 * inner + 5.0 * inner**2 + 1100.0 * outer + 9.0 * outer**2

    def count(method: Any, F: Any, state: Any, batches: Any) -> float:
        assert len(state.x) == 1 and state.x.device.type == "meta"
        counted.append(tuple(batches))
        return operations(method, batches)

    monkeypatch.setattr(costs, "flops_of_step", count)
    monkeypatch.setattr(costs, "shortest", lambda source, lengths: lengths)
    methods = [PF2LoRA(P.layout, lr=lr) for lr in (0.5, 0.25)]
    random = np.random.default_rng(0)
    ledger, expected = StepLedger(), 0.0
    for i in range(40):
        lengths = tuple(int(n) for n in random.integers(10, 300, 2))
        step = Step(methods[i % 2], int(random.integers(1, 9)), lengths)
        ledger.add(step)
        expected += step.clients * operations(step.method, lengths)
    state = methods[0].init(P.x, P.y)
    found = ledger.flops(P.F, None, state, torch.device("meta"))  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(counted) == 2 * 5
    assert StepLedger().flops(P.F, None, state, CPU) == 0  # type: ignore[arg-type]


def test_counting_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    method = HomLoRA(P.layout)
    counted = costs.flops_of_step(method, P.F, method.init(P.x, P.y), [P.source.draw([0, 1, 2], [0] * 3)])
    assert counted > 0 and capsys.readouterr() == ("", "")


def test_a_few_lengths_are_the_least_the_middle_and_the_greatest() -> None:
    assert few_lengths(np.array([20, 5, 9])) == [5, 12, 20]
    assert few_lengths(np.array([6, 4, 4])) == [4, 5, 6]
    assert few_lengths(np.array([7, 8])) == [7, 8]
    assert few_lengths(np.array([7, 7])) == [7]


def test_powers_are_one_and_the_first_two_of_each_length() -> None:
    found = powers(np.array([[128, 256], [64, 0]]))
    assert found.tolist() == [[1, 1, 2, 1, 4], [1, 0.5, 0, 0.25, 0]]


@pytest.mark.parametrize("keyed", [False, True])
def test_batches_to_count_with_are_of_the_shortest_row_at_the_asked_lengths(keyed: bool) -> None:
    data = tiny_data((5, 9))
    source = EncodedSource(data, ["a", "b"], 3, (0,), keyed=keyed)
    row = int(np.argmin(data.lengths))
    least = int(data.lengths[row])
    for batch, length in zip(shortest(source, [12, 7]), [12, 7]):
        assert batch.clients == 1 and batch.length == length
        expected = data.token_columns["input_ids"][row, :length].expand(3, -1)
        assert torch.equal(batch.tensors["input_ids"], expected)
        assert batch.tensors["attention_mask"].sum(1).tolist() == [least] * 3
        if keyed:
            assert batch.key is not None and batch.key.dtype is torch.int64 and batch.key.tolist() == [0]
        else:
            assert batch.key is None


def test_batches_to_count_with_are_where_the_data_is() -> None:
    source = EncodedSource(tiny_data((5, 9)).to(torch.device("meta")), ["a", "b"], 3, (0,), keyed=True)
    (batch,) = shortest(source, [12])
    assert batch.key is not None
    assert {t.device.type for t in (batch.key, *batch.tensors.values())} == {"meta"}


# ---- memory ----


def test_memory_of_a_gpu_is_what_torch_allocated_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {CUDA: 12345}.__getitem__)
    costs.start_memory_count(CUDA)
    assert asked == [CUDA] and costs.peak_memory(CUDA) == 12345


def test_memory_of_a_process_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, clear = tmp_path / "status", tmp_path / "clear_refs"
    monkeypatch.setattr(costs, "STATUS", status)
    monkeypatch.setattr(costs, "CLEAR_PEAK", clear)
    costs.start_memory_count(CPU)
    assert not clear.exists()  # where the kernel has no such file, none is made
    assert costs.peak_memory(CPU) is None  # nor does it tell
    clear.write_text("")
    costs.start_memory_count(CPU)
    assert clear.read_text() == "5"
    status.write_text("Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t  123 kB\nVmRSS:\t  7 kB\n")
    assert costs.peak_memory(CPU) == 123 * 1024
    status.write_text("Name:\tpython\nVmPeak:\t  999 kB\n")
    assert costs.peak_memory(CPU) is None
    monkeypatch.setattr(
        costs, "CLEAR_PEAK", tmp_path
    )  # a folder: it cannot be written to, and that is no error
    costs.start_memory_count(CPU)
