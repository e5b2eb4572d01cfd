"""A client that joins later: only its own adapter and a head of its own move, the common one is left as it was."""

from __future__ import annotations

import torch
from tiny import Problem, regression_problem

from pf2lora.core.layout import Layout
from pf2lora.methods.newcomer import Newcomer

ALL = [0, 1, 2]


def with_a_personal_head() -> Problem:
    """The last entry, the head, is not shared."""
    p = regression_problem()
    return p._replace(layout=Layout(p.layout.entries, p.layout.adapter_size))


def test_the_own_adapter_takes_sgd_steps_and_a_personal_head_adamw_steps() -> None:
    """`y ← y − α ∇_y F(x, y)` beside torch's AdamW on the head, from gradients at the same point, over two steps."""
    p = with_a_personal_head()
    shared = p.layout.shared
    method = Newcomer(p.layout, lr=0.05, weight_decay=0.1, client_lr=0.2)
    state = method.init(p.x, p.y)
    heads = [row[shared:].clone().requires_grad_() for row in p.x]
    optimizer = torch.optim.AdamW(heads, lr=0.05, weight_decay=0.1)
    y = p.y
    for number in range(2):
        batch = p.source.draw(ALL, [number] * 3)
        x = torch.cat([p.x[:, :shared], torch.stack([h.detach() for h in heads])], dim=1)
        x_, y_ = x.clone().requires_grad_(), y.clone().requires_grad_()
        loss = p.F(x_, y_, batch)
        gx, gy = torch.autograd.grad(loss.sum(), (x_, y_))
        for head, gradient in zip(heads, gx[:, shared:]):
            head.grad = gradient.clone()
        optimizer.step()
        y = y - 0.2 * gy
        state, report = method.step(p.F, state, batch)
        torch.testing.assert_close(report.loss, loss.detach(), rtol=0, atol=1e-14)
        assert not report.loss.requires_grad
        torch.testing.assert_close(state.y, y, rtol=0, atol=1e-13)
        torch.testing.assert_close(state.x[:, shared:], torch.stack(heads).detach(), rtol=0, atol=1e-13)
        assert torch.equal(state.x[:, :shared], p.x[:, :shared])
    assert (state.x[:, shared:] != p.x[:, shared:]).all() and (state.y != p.y).any(1).all()


def test_a_common_head_stays_as_it_is() -> None:
    """All of x is shared: there is nothing of it that a newcomer may move."""
    p = regression_problem()
    method = Newcomer(p.layout, client_lr=0.2)
    state, _ = method.step(p.F, method.init(p.x, p.y), p.source.draw(ALL, [0] * 3))
    assert torch.equal(state.x, p.x) and not torch.equal(state.y, p.y)
    assert state.opt.mean.shape == (3, 0)


def test_a_newcomer_exchanges_nothing() -> None:
    p = with_a_personal_head()
    method = Newcomer(p.layout)
    state = method.init(p.x, p.y)
    kept, sent = method.send(state, 1)
    assert kept is state and sent.shape == (3, 0) and method.sent_numbers(state, 1) == [0, 0, 0]
    after = method.receive(state, sent[0], 1)
    assert all(old is new for old, new in zip(state, after))
