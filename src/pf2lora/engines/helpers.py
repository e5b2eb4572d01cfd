"""Processes of one machine that compute a batch's loss together: each takes some of every client's rows.

The first process has all state and takes every step. A helper is handed x, y and its rows, gives back the sums of their
losses with the gradient, and keeps nothing. x, y and gradients lie in memory that these processes share, all else goes
through a pair of sockets that nobody else can open: no port is listened on, and nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from pf2lora.engines.accumulation import Summed, Sums, Wanted, summed
from pf2lora.engines.batches import Batch
from pf2lora.engines.processes import heard, kind_of
from pf2lora.engines.room import free_memory
from pf2lora.errors import UserError, one_line

LINE = 64  # bytes to which a place in the shared memory is rounded up
ENDING = 5.0  # seconds in which a process that has closed its channel is gone


class HelperLost(UserError):
    """A helper has ended."""


class Numbers:
    """Memory that processes share, with a place for x and y, and one for each helper's slopes of them. The `file` has
    no name: a process has it from the one that started it."""

    def __init__(self, file: int, places: int, room: int) -> None:
        self.file, self.places, self.room = file, places, room
        self.memory = mmap.mmap(file, places * room)
        weakref.finalize(self, os.close, file)

    @classmethod
    def made(cls, helpers: int, *tensors: Tensor) -> Numbers:
        """With room for tensors of these sizes."""
        size = sum(t.nbytes for t in tensors)
        places, room = helpers + 1, LINE * (1 + size // LINE)
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("pf2lora")
        else:
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, places * room)
        return cls(file, places, room)

    def place(self, number: int, request: Request) -> tuple[Tensor, Tensor]:
        """Place `number`, as the x and the y of a request."""
        x, y = torch.Size(request.x), torch.Size(request.y)
        dtype: torch.dtype = getattr(torch, request.dtype)
        count = x.numel() + y.numel()
        assert count * dtype.itemsize <= self.room
        flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=number * self.room)
        return flat[: x.numel()].view(x), flat[x.numel() :].view(y)


@dataclass(frozen=True)
class Request:
    """What a helper is asked for, beside x and y and its rows' tensors."""

    x: tuple[int, ...]
    y: tuple[int, ...]
    dtype: str
    wanted: Wanted
    rows: int | None  # at a time
    repeated: bool  # layers are run again for the gradient
    key: list[int] | None = None
    plain: Mapping[str, int | None] = field(default_factory=dict)  # the batch's other fields

    def of(self, share: Batch) -> Request:
        """The same for these rows."""
        named = [f.name for f in fields(Batch) if f.name not in ("tensors", "key")]
        key = None if share.key is None else share.key.tolist()
        return replace(self, key=key, plain={name: getattr(share, name) for name in named})

    def batch(self, tensors: dict[str, Tensor], device: torch.device) -> Batch:
        """The rows on their device."""
        there = {name: t.to(device) for name, t in tensors.items()}
        key = None if self.key is None else torch.tensor(self.key, device=device)
        plain: dict[str, Any] = dict(self.plain)
        return Batch(tensors=there, key=key, **plain)


# --- the first process -------------------------------------------------------------------------------------


class Process(Protocol):
    """A helper's, as `subprocess` has it."""

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


Launch = Callable[[Connection, int], Process]
"""Starts a process that will `serve`, with its end of a channel and the shared memory's file."""


class Helper(NamedTuple):
    """One helper as the first process sees it."""

    number: int  # from 1
    process: Process
    channel: Connection


class Helpers:
    """The helpers of this process. They are started when they are first needed; when one is lost all are ended, and
    started again when they are next needed. `order` says to each what it is to compute with, and `repeated` whether
    layers are run again for a gradient."""

    def __init__(
        self,
        numbers: Numbers,
        launch: Launch,
        order: Callable[[int], Mapping[str, Any]],
        repeated: Callable[[], bool] = lambda: False,
    ) -> None:
        self.numbers, self.launch, self.order, self.repeated = numbers, launch, order, repeated
        self.running: list[Helper] = []

    @property
    def size(self) -> int:
        """The processes, with this one."""
        return self.numbers.places

    def start(self) -> None:
        """Start them, and wait until they are ready; a UserError says why one is not."""
        if self.running:
            return
        try:
            for number in range(1, self.size):
                ours, theirs = Pipe()
                with theirs:
                    self.running.append(Helper(number, self.launch(theirs, self.numbers.file), ours))
                about = {"number": number, "places": self.numbers.places, "room": self.numbers.room}
                self.tell(self.running[-1], json.dumps(about | {"order": self.order(number)}).encode())
            self.answers(self.running)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def computing(
        self, x: Tensor, y: Tensor, shares: Sequence[Batch], rows: int | None, wanted: Wanted
    ) -> Iterator[list[Summed]]:
        """The helpers compute their `shares` meanwhile; what they found is in the list afterwards."""
        self.start()
        found: list[Summed] = []
        busy: list[Helper] = []
        dtype = str(x.dtype).removeprefix("torch.")
        request = Request(tuple(x.shape), tuple(y.shape), dtype, wanted, rows, self.repeated())
        for place, tensor in zip(self.numbers.place(0, request), (x, y)):
            place.copy_(tensor)
        try:
            for helper, share in zip(self.running, shares):
                there = {name: t.cpu().contiguous() for name, t in share.tensors.items()}
                self.tell(helper, json.dumps(asdict(request.of(share))).encode(), save(there))
                busy.append(helper)
            yield found
        finally:  # whatever happened here: a later request is not to get the answers to this one
            answers = self.answers(busy) if self.running else []
        for helper, (losses, weights) in zip(busy, answers):
            x_slope, y_slope = self.numbers.place(helper.number, request)
            slopes = (x_slope if wanted[0] else None, y_slope if wanted[1] else None)
            found.append(Summed(x.new_tensor(losses), x.new_tensor(weights), slopes))

    def tell(self, helper: Helper, *parts: bytes) -> None:
        try:
            for part in parts:
                helper.channel.send_bytes(part)
        except OSError:
            raise self.lost(helper) from None

    def answers(self, helpers: Sequence[Helper]) -> list[Any]:
        """What all of them answer; the first one's error, where there are any."""
        told = []
        for helper in helpers:
            try:
                told.append(json.loads(helper.channel.recv_bytes()))
            except (OSError, EOFError):
                raise self.lost(helper) from None
            except BaseException:  # an interrupt: what they answer is nobody's
                self.close()
                raise
        for helper, answer in zip(helpers, told):
            if answer["error"] is not None:
                raise heard(helper.number + 1, *answer["error"])
        return [answer["found"] for answer in told]

    def lost(self, helper: Helper) -> HelperLost:
        """The error about a helper that has ended; the others end, too."""
        helper.channel.close()
        try:
            code = helper.process.wait(ENDING)
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "it hangs"
        self.close()
        return HelperLost(
            f"process {helper.number + 1} of the {self.size} that share a batch has ended ({how}); it is started again "
            f"when the next round begins: is the machine's memory large enough for {self.size}?"
        )

    def close(self) -> None:
        """End them: they have nothing to lose."""
        for helper in self.running:
            helper.channel.close()
            helper.process.kill()
            helper.process.wait()
        self.running.clear()


# --- a helper ----------------------------------------------------------------------------------------------


class Computing(NamedTuple):
    """What a helper computes with."""

    sums: Sums
    device: torch.device
    repeat_layers: Callable[[bool], None] = lambda on: None


def serve(channel: Connection, file: int, build: Callable[[Mapping[str, Any]], Computing]) -> None:
    """A helper's life: `build` what it computes with from the order that comes first, say so, and answer requests
    until the first process is gone."""
    try:
        about = json.loads(channel.recv_bytes())
        number, numbers = about["number"], Numbers(file, about["places"], about["room"])
        built: list[Computing] = []
        channel.send_bytes(answered(lambda: built.append(build(about["order"]))))
        while built:
            request, tensors = Request(**json.loads(channel.recv_bytes())), load(channel.recv_bytes())

            def compute(request: Request = request, tensors: dict[str, Tensor] = tensors) -> Any:
                return computed(built[0], numbers, number, request, tensors)

            channel.send_bytes(answered(compute))
    except (EOFError, OSError):
        return


def answered(work: Callable[[], Any]) -> bytes:
    """What `work` returns, or the error that it ends with, as an answer."""
    found = error = None
    try:
        found = work()
    except Exception as caught:
        error = [kind_of(caught), one_line(caught)]
    if error is not None:
        free_memory()
    return json.dumps({"found": found, "error": error}).encode()


def computed(
    computing: Computing, numbers: Numbers, number: int, request: Request, tensors: dict[str, Tensor]
) -> tuple[list[float], list[float]]:
    """The sums of losses and weights of the rows; the slopes are in this helper's place."""
    sums, device, repeat_layers = computing
    repeat_layers(request.repeated)
    batch = request.batch(tensors, device)
    x, y = (t.to(device) for t in numbers.place(0, request))
    parts = [batch] if request.rows is None else batch.parts(request.rows)
    losses, weights, slopes = summed(sums, x, y, parts, request.wanted)
    for place, slope in zip(numbers.place(number, request), slopes):
        if slope is not None:
            place.copy_(slope)
    return losses.tolist(), weights.tolist()
