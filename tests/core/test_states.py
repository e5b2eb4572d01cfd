"""Clients' states: some of them taken out and put back, on a device, and what a client's gradient is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import regression_problem
from torch import Tensor

from pf2lora.core.layout import Layout
from pf2lora.core.method import State, gradients, moved, over_tensors, put, rows_of, take, variable
from pf2lora.core.optim import Moments
from pf2lora.methods.homlora import HomLoRA

CPU = torch.device("cpu")


def state_of(clients: int, offset: float = 0.0) -> State:
    """Numbers that tell client and place; the optimizer's part is nested, with a plain tuple in it."""
    rows = torch.arange(clients, dtype=torch.float64).unsqueeze(1)
    moments = Moments(rows + 300 + offset, rows + 400 + offset, rows + 500 + offset)
    nested = (moments, rows.squeeze(1) + 600 + offset)
    return State(rows + 100 + offset, (rows + 200 + offset).expand(-1, 2).clone(), nested)


def leaves(state: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    over_tensors(note, state)
    return found


@pytest.mark.parametrize("clients", [[0], [3], [1, 2], [0, 1, 2, 3, 4], [4, 0], [2, 2], [0, 2, 3], [3, 2]])
def test_the_states_taken_are_those_of_the_clients_in_their_order(clients: list[int]) -> None:
    whole = state_of(5)
    part = take(whole, clients)
    assert type(part) is State and type(part.opt) is tuple and type(part.opt[0]) is Moments
    for found, all_rows in zip(leaves(part), leaves(whole), strict=True):
        assert torch.equal(found, torch.stack([all_rows[k] for k in clients]))
    neighbours = clients == [*range(clients[0], clients[0] + len(clients))]
    assert (part.x.untyped_storage().data_ptr() == whole.x.untyped_storage().data_ptr()) is neighbours
    assert isinstance(rows_of(clients, CPU), slice) is neighbours


@pytest.mark.parametrize("clients", [[0], [4], [1, 2], [0, 1, 2, 3, 4], [4, 0], [0, 2, 3]])
def test_states_put_back_replace_those_of_their_clients_and_no_others(clients: list[int]) -> None:
    whole, part = state_of(5), state_of(len(clients), offset=0.5)
    put(whole, clients, part)
    for old, new, now in zip(leaves(state_of(5)), leaves(part), leaves(whole), strict=True):
        expected = [new[clients.index(k)] if k in clients else old[k] for k in range(5)]
        assert torch.equal(now, torch.stack(expected))


def test_a_state_moves_to_a_device_as_a_whole() -> None:
    there = moved(state_of(3), "meta")
    assert {t.device.type for t in leaves(there)} == {"meta"} and type(there) is State
    assert isinstance(there.opt[0], Moments)
    rows = rows_of([2, 0], torch.device("meta"))
    assert isinstance(rows, Tensor) and rows.device.type == "meta"
    assert {t.device.type for t in leaves(take(there, [2, 0]))} == {"meta"}


@pytest.mark.parametrize("clients", [[2, 0], [1, 2]])
def test_states_are_put_back_from_another_device(clients: list[int]) -> None:
    """Rows, index and new numbers meet on the device of the whole; meta refuses any that do not."""
    there = moved(state_of(3), "meta")
    put(there, clients, state_of(2))
    assert {t.device.type for t in leaves(there)} == {"meta"}


def test_a_function_of_several_states_meets_the_same_place_of_each() -> None:
    total = over_tensors(lambda a, b, c: a + 10 * b + 100 * c, state_of(2), state_of(2, 1), state_of(2, 2))
    for found, a in zip(leaves(total), leaves(state_of(2)), strict=True):
        assert torch.equal(found, a + 10 * (a + 1) + 100 * (a + 2))


# ---- gradients ----


def test_a_clients_gradient_is_of_its_own_loss_whoever_is_beside_it() -> None:
    x = variable(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64))
    (g,) = gradients(x.pow(3).sum(1), x)
    torch.testing.assert_close(g, 3 * x.detach().square(), rtol=1e-15, atol=0)
    assert not g.requires_grad


def test_gradients_of_what_is_empty_or_has_no_part_in_the_loss_are_zero() -> None:
    x, empty, other = (variable(torch.ones(2, n, dtype=torch.float64)) for n in (3, 0, 2))
    gx, gempty, gother = gradients(x.square().sum(1), x, empty, other)
    assert gx.tolist() == [[2.0] * 3] * 2
    assert gempty.shape == (2, 0) and gempty.dtype is torch.float64
    assert gother.tolist() == [[0.0] * 2] * 2
    assert gradients(x.sum(1), empty)[0].shape == (2, 0)
    first, second = gradients(x.square().sum(1), empty, x)
    assert first.shape == (2, 0) and torch.equal(second, gx)  # each in its own place


def test_gradients_with_a_graph_are_differentiated_again() -> None:
    x = variable(torch.tensor([[2.0], [3.0]], dtype=torch.float64))
    (g,) = gradients(x.pow(3).sum(1), x, graph=True)
    (second,) = gradients(g.sum(1), x)
    torch.testing.assert_close(second, 6 * x.detach(), rtol=1e-15, atol=0)


def test_a_variable_is_a_leaf_with_the_same_numbers() -> None:
    before = variable(torch.ones(2, 2)) * 3
    after = variable(before)
    assert after.is_leaf and after.requires_grad and torch.equal(after, before)


# ---- a round's end ----


def test_what_is_not_shared_neither_leaves_nor_is_overwritten() -> None:
    p = regression_problem()
    shared = p.layout.adapter_size
    method = HomLoRA(Layout(p.layout.entries, shared))
    x = p.x * torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    state, sent = method.send(method.init(x, p.y), 1)
    assert torch.equal(sent, x[:, :shared])
    common = method.average(sent, torch.tensor([0.5, 0.25, 0.25]))  # float32 weights, float64 numbers
    torch.testing.assert_close(common, 1.75 * p.x[0, :shared], rtol=1e-15, atol=1e-15)
    after = method.receive(state, common, 1)
    assert torch.equal(after.x[:, :shared], common.expand(3, -1)) and torch.equal(
        after.x[:, shared:], x[:, shared:]
    )
    assert after.opt is state.opt and after.y is state.y


@pytest.mark.parametrize("head", ["shared", "personal"])
def test_numbers_sent_and_trained_of_a_method_with_one_rank(head: str) -> None:
    p = regression_problem()
    adapter, whole = p.layout.adapter_size, p.layout.size
    method = HomLoRA(Layout(p.layout.entries, whole if head == "shared" else adapter))
    state = method.init(p.x, p.y)
    assert method.ranks_of(state) == [None] * 3
    assert method.sent_numbers(state, 1) == [whole if head == "shared" else adapter] * 3
    assert method.trained_numbers(state) == [adapter] * 3  # the head is told apart
