"""A compiler that fails: passes are run as they are, with the plain passes' numbers and one line that says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from little_world import make_world
from stand_in_graphs import StandInGraph, stepper_of
from tiny import build, tiny_problem
from tiny_language_models import loss_and_gradients, two_level, whole
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import pf2lora
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.failures import compiler_failed, ran_out
from pf2lora.engines.local import Schedule, train
from pf2lora.engines.room import Room

NO_COMPILER = "No working C++ compiler found: /nonexistent/g++"
compile_ = torch.compile


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def unbroken(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError(NO_COMPILER + "\n\nand much advice")


def out_of_memory(graph: Any, inputs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def compile_by(monkeypatch: pytest.MonkeyPatch, backend: Any, only: str = "") -> None:
    """Compile by this backend; the functions whose name is not `only` by one that works."""

    def compiled(function: Any, **options: Any) -> Any:
        takes = not only or getattr(function, "__name__", "") == only
        return compile_(function, backend=backend if takes else "eager", **options)

    monkeypatch.setattr(torch, "compile", compiled)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pf2lora"]


def run(kind: str, *, compiled: bool, graphs: bool = False, room: Room | None = None) -> Tensor:
    p = tiny_problem(kind)
    assert p.model is not None
    if compiled:
        p.model.compile()
    method = build("pf2lora-difference", p)
    begun = method, p.F, method.init(p.x, p.y), p.source, Schedule(2, 2)
    *_, last = train(*begun, stepper=stepper_of(p.F, graphs), room=room)
    assert not p.model.compiled and not p.model.compiles_layers
    return last.served.x


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["roberta", "llama"])
def test_a_run_goes_on_as_it_is(
    kind: str, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the last bit, whichever half of a pass cannot be compiled; what is compiled for the gradient is compiled with
    the pass, so that a step is not half done."""
    plain = run(kind, compiled=False)
    compile_by(
        monkeypatch, broken if fails == "forward" else aot_autograd(fw_compiler=unbroken, bw_compiler=broken)
    )
    assert torch.equal(run(kind, compiled=True), plain)
    (line,) = lines(caplog)
    assert line.startswith("the compiler failed, so that passes are run as they are:")
    assert NO_COMPILER in line and "advice" not in line


def test_recorded_steps_are_recorded_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stand_in_graphs: None
) -> None:
    plain = run("roberta", compiled=False)
    compile_by(monkeypatch, broken)
    StandInGraph.replays = 0
    torch.testing.assert_close(run("roberta", compiled=True, graphs=True), plain, rtol=0, atol=1e-9)
    assert StandInGraph.replays == 4  # all steps, by recordings
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("only", ["", "loss_and_slope"])
def test_language_models(
    only: str, repeated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the layers were compiled and the loss is not, the whole pass is done again."""
    model, x, y = two_level("llama")
    model.repeat_layers(repeated)
    plain = loss_and_gradients(model, x, y, whole())
    compile_by(monkeypatch, broken, only)
    model.compile()
    for _ in range(2):
        for ours, expected in zip(loss_and_gradients(model, x, y, whole()), plain):
            assert torch.equal(ours, expected)
    assert len(lines(caplog)) == 1


def test_it_is_not_tried_again_by_the_next_method(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_by(monkeypatch, broken)
    model, x, y = two_level("llama")
    model.compile()
    loss_and_gradients(model, x, y, whole())
    model.remove()
    again = TwoLevelModel(model.model, model.spec)
    again.compile()
    loss_and_gradients(again, x, y, whole())
    assert not again.compiles_layers and len(lines(caplog)) == 1


def test_memory_that_ends_is_not_the_compilers_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes the way of memory, and passes are still compiled."""
    compile_by(monkeypatch, out_of_memory)
    model, x, y = two_level("llama")
    model.compile()
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        loss_and_gradients(model, x, y, whole())
    assert ran_out(raised.value) and not compiler_failed(raised.value)
    assert model.compiles_layers and not lines(caplog)


def test_another_failure_is_nobodys_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any, **options: Any) -> Any:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("of the pass itself")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    model, x, y = two_level("llama")
    model.compile()
    with pytest.raises(ValueError, match="of the pass itself"):
        loss_and_gradients(model, x, y, whole())
    assert model.compiles_layers


def test_federate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A comparison that asks for compiled passes: one line, and the scores of one that does not."""
    settings = make_world(tmp_path).settings(method=["homlora", "pf2lora"], rounds=1, steps=1)
    plain = pf2lora.federate(**settings)
    compile_by(monkeypatch, broken)
    found = pf2lora.federate(**settings, compile=True)
    for method in ("homlora", "pf2lora"):
        assert found.served(method=method) == plain.served(method=method)
    assert len([line for line in lines(caplog) if "the compiler failed" in line]) == 1
