"""Each faster path against the slower one. What needs a CUDA device is skipped without one."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from recordable import attending
from stand_in_graphs import StandInGraph, stepper_of
from tiny import CONFIGS, tiny_data, tiny_model, tiny_problem

from pf2lora.adapters.architectures import ARCHITECTURES, needed_mask
from pf2lora.core.rates import RateSchedule
from pf2lora.engines import stepper
from pf2lora.engines.batches import Batch, EncodedSource, batch_rows_by_length, stream_rows
from pf2lora.engines.local import Schedule, train
from pf2lora.engines.room import Room
from pf2lora.engines.stepper import GraphStepper, PlainStepper, Recording
from pf2lora.methods import METHODS
from pf2lora.methods.pf2lora import PF2LoRA

NAMES = ["a", "b", "c"]
RATES: dict[str, dict[str, Any]] = {"pf2lora": {"client_lr": 1e-4}, "per-fedavg": {"adaptation_lr": 1e-4}}


def test_batches_by_length_hold_the_same_rows_as_the_stream() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 37)
    window, size = 4, 5
    for first in (0, 8):
        batches = [batch_rows_by_length(0, "a", lengths, first + i, size, window) for i in range(window)]
        rows = stream_rows(0, "a", 37, first * size, (first + window) * size)
        assert sorted(np.concatenate(batches)) == sorted(rows)
        shortest_first = sorted(batches, key=lambda b: lengths[b].max())
        for short, long in pairwise(shortest_first):
            assert lengths[short].max() <= lengths[long].min()


def test_batches_by_length_pad_less_and_depend_on_nobody_else() -> None:
    data = tiny_data([60, 50, 70], longest=40)
    plain = EncodedSource(data, NAMES, 4, seeds=(0,))
    grouped = EncodedSource(data, NAMES, 4, seeds=(0,), window=8)

    def width(source: EncodedSource) -> int:
        return sum(source.draw([0, 1, 2], [n] * 3).tensors["input_ids"].shape[1] for n in range(16))

    assert width(grouped) < 0.9 * width(plain)
    alone = grouped.draw([1], [3]).tensors["labels"]
    assert torch.equal(grouped.draw([0, 1, 2], [3] * 3).tensors["labels"][4:8], alone)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_full_batch_needs_no_mask(kind: str) -> None:
    """The same loss with and without the mask where no row is padded."""
    p = tiny_problem(kind)
    assert p.model is not None
    tokens = torch.randint(3, 50, (6, 9), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(tokens)
    with_mask = p.model(p.x, p.y, input_ids=tokens, attention_mask=ones).logits
    without = p.model(p.x, p.y, input_ids=tokens).logits
    torch.testing.assert_close(with_mask, without, rtol=0, atol=1e-12)


def test_masks_by_architecture() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert needed_mask(ARCHITECTURES["gpt2"], mask, torch.float32) is None
    assert needed_mask(ARCHITECTURES["deberta-v2"], mask, torch.float32) is mask
    bias = needed_mask(ARCHITECTURES["roberta"], mask, torch.float32)
    assert bias is not None and bias.shape == (2, 1, 3, 3)
    assert (bias[0, 0, :, 2] == torch.finfo(torch.float32).min).all() and not bias[1].any()


@pytest.mark.slow
def test_compiled_passes_give_the_same_run() -> None:
    """On the device that is there: a machine with an accelerator need not have what compiling for its CPU takes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ends = []
    for compiled in (False, True):
        p = tiny_problem("roberta")
        assert p.model is not None and isinstance(p.source, EncodedSource)
        p.model.model.to(device)  # type: ignore[arg-type]
        if compiled:
            p.model.compile()
        method = PF2LoRA(p.layout, client_lr=0.1)
        source = replace(p.source, data=p.source.data.to(device))
        rounds = train(
            method,
            p.F,
            method.init(p.x, p.y),
            source,
            Schedule(2, 2),
            device=device,
            stepper=PlainStepper(p.F),
        )
        ends.append([done.kept() for done in rounds][-1].served.x.cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("homlora", {}),
        ("per-fedavg", {}),
        ("pf2lora", {}),
        ("pf2lora", {"hypergradient_mode": "auto", "precision": "bfloat16"}),
    ],
)
@pytest.mark.parametrize("rates", [RateSchedule(), RateSchedule("linear", 0.25)], ids=["constant", "linear"])
def test_replays_begin_where_the_last_step_ended(
    name: str, options: dict[str, Any], rates: RateSchedule, stand_in_graphs: None
) -> None:
    """Steps of several lengths, methods and passes: each replay has the state, batches and rates of its own step."""
    runs = []
    for graphs, per_pass in ((False, None), (True, None), (True, 2)):
        p = tiny_problem("roberta")
        method = METHODS[name](p.layout, **RATES.get(name, {}), **options)
        assert isinstance(p.source, EncodedSource)
        source = replace(p.source, window=4, alike=method.draws)
        schedule = Schedule(3, 4, clients_per_pass=per_pass, rates=rates)
        StandInGraph.replays = 0
        begun = method, p.F, method.init(p.x, p.y), source, schedule
        rounds = [r.kept() for r in train(*begun, stepper=stepper_of(p.F, graphs))]
        assert StandInGraph.replays == (0 if not graphs else 12 if per_pass is None else 24)
        runs.append(rounds)
    for plain, *recorded in zip(*runs):
        for other in recorded:
            torch.testing.assert_close(other.served.x, plain.served.x, rtol=0, atol=1e-9)
            torch.testing.assert_close(other.stats.loss, plain.stats.loss, rtol=0, atol=1e-9)
            assert (other.stats.second_order is None) is (plain.stats.second_order is None)
    if options:
        assert [r.stats.second_order is None for r in runs[1]] == [False, True, True]


def recorded_run(steps: GraphStepper, room: Room | None = None, per_pass: int | None = None) -> torch.Tensor:
    """The end of a run with steps of several lengths, by this stepper."""
    p = tiny_problem("roberta")
    steps.F = p.F
    method = METHODS["homlora"](p.layout)
    assert isinstance(p.source, EncodedSource)
    source = replace(p.source, window=4, alike=method.draws)
    schedule = Schedule(3, 4, clients_per_pass=per_pass)
    *_, last = train(method, p.F, method.init(p.x, p.y), source, schedule, stepper=steps, room=room)
    return last.served.x


def test_recordings_of_one_shape_share_their_states_place(stand_in_graphs: None) -> None:
    """A state as large as all clients' is there once, and not once for each length of a batch."""
    steps = GraphStepper(lambda x, y, batch: x.sum(1))
    recorded_run(steps)
    states = [recording.state for recording in steps.recordings.values()]
    assert len(states) > 1 and all(state is states[0] for state in states) and len(steps.places) == 1
    steps = GraphStepper(lambda x, y, batch: x.sum(1))
    recorded_run(steps, per_pass=2)
    places = {id(recording.state) for recording in steps.recordings.values()}
    assert len(places) == len(steps.places) == 2  # of two clients, and of one
    assert steps.forget() and not steps.places and not steps.forget()


def test_other_recordings_give_way_before_a_pass_is_halved(
    stand_in_graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory for one recording: the next one takes its, and the run goes on where it was."""
    expected = recorded_run(GraphStepper(lambda x, y, batch: x.sum(1)))
    record, held = GraphStepper.record, list[int]()

    def bounded(self: GraphStepper, *args: Any) -> Recording:
        if self.recordings:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        held.append(1)
        return record(self, *args)

    monkeypatch.setattr(GraphStepper, "record", bounded)
    monkeypatch.setattr(stepper, "free_memory", lambda: None)
    room = Room()
    found = recorded_run(GraphStepper(lambda x, y, batch: x.sum(1)), room)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert room.clients is None and len(held) > 2
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["out of memory beside 1 recorded steps"]


class FailingGraph(StandInGraph):
    """A recording that an operation has broken: ending it, which torch does all the same, fails as well."""

    def __init__(self, pool: None = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.capture_end()

    def capture_end(self) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore")


def test_a_fallback_names_the_operation_that_broke_the_recording(
    stand_in_graphs: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: FailingGraph())
    p = tiny_problem("roberta")
    calls = 0

    def asking(x: torch.Tensor, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:  # after three that are tried aside
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return p.F(x, y, batch)

    method = METHODS["homlora"](p.layout)
    batch = p.source.draw([0, 1, 2], [0, 0, 0])
    try:
        raise MemoryError("an older one, which is being handled")
    except MemoryError:
        stepper = GraphStepper(asking)
        stepper(method, method.init(p.x, p.y), [batch])
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith('steps run without a CUDA graph: `raise RuntimeError("operation not permitted')
    assert line.endswith("): operation not permitted when stream is capturing")
    assert "(test_fast_paths.py, line " in line and stepper.plain


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("rates", [RateSchedule(), RateSchedule("linear", 0.25)], ids=["constant", "linear"])
@pytest.mark.parametrize("name", ["pf2lora", "homlora", "per-fedavg", "hetlora"])
def test_recorded_steps_and_waiting_clients_give_the_plain_numbers(name: str, rates: RateSchedule) -> None:
    """Plain on the device; recorded as CUDA graphs; recorded with two clients a pass and the others on the host."""
    device = torch.device("cuda")
    runs = []
    for graphs, per_pass in ((False, None), (True, None), (True, 2)):
        p = tiny_problem("roberta")
        assert p.model is not None
        p.model.model.to(device)  # type: ignore[arg-type]
        options: dict[str, Any] = {"ranks": (2, 3, 4)} if name == "hetlora" else {}
        method = METHODS[name](p.layout, **options)
        assert isinstance(p.source, EncodedSource)
        source = EncodedSource(p.source.data.to(device), p.source.names, 4, seeds=(0,), alike=method.draws)
        schedule = Schedule(3, 4, clients_per_pass=per_pass, rates=rates)
        begun = method, p.F, method.init(p.x, p.y), source, schedule
        *_, last = train(*begun, device=device, stepper=stepper_of(p.F, graphs))
        assert last.served.x.device.type == ("cuda" if per_pass is None else "cpu")
        runs.append(last.served.x.cpu())
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-9)
    torch.testing.assert_close(runs[0], runs[2], rtol=0, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_architecture_is_recorded(kind: str, attention: str, caplog: pytest.LogCaptureFixture) -> None:
    """Padded and full batches: no step falls back to the plain way, and the numbers are the plain ones'.

    Within the order of summation: AdamW makes a step of a rounding where a gradient is nearly zero. On a CPU, two
    models that differ by one rounding end apart by up to 3e-6 on average, and by 7e-4 in single numbers.
    """
    device = torch.device("cuda")
    ends = []
    for graphs in (False, True):
        p = tiny_problem(kind, model=attending(kind, attention, torch.float32).to(device))  # type: ignore[arg-type]
        assert isinstance(p.source, EncodedSource)
        x, y = p.x.float(), p.y.float()
        method = PF2LoRA(p.layout, lr=1e-3, client_lr=0.1)
        source = EncodedSource(p.source.data.to(device), p.source.names, 4, seeds=(0,), alike=method.draws)
        begun = method, p.F, method.init(x, y), source, Schedule(3, 4)
        *_, last = train(*begun, device=device, stepper=stepper_of(p.F, graphs))
        ends.append(last.served.x.cpu())
    assert "without a CUDA graph" not in caplog.text
    assert (ends[0] - ends[1]).abs().mean() < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
def test_recordings_leave_no_memory_behind() -> None:
    """A comparison's later methods have the memory that its first had."""
    device, held = torch.device("cuda"), []
    for _ in range(4):
        p = tiny_problem("roberta", model=tiny_model("roberta", dtype=torch.float32).to(device))  # type: ignore[arg-type]
        assert isinstance(p.source, EncodedSource)
        method = PF2LoRA(p.layout)
        source = EncodedSource(p.source.data.to(device), p.source.names, 4, seeds=(0,), alike=method.draws)
        state = method.init(p.x.float(), p.y.float())
        *_, last = train(method, p.F, state, source, Schedule(3, 4), device=device)
        del p, source, state, last
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[1] < 8_000_000
