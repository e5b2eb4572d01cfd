"""The processes of a run that several of them share, and what they tell each other: torch.distributed under torchrun.

One process alone is the usual case, in which nothing here does anything. Figures travel as JSON and files as bytes,
over gloo; tensors as they are, over NCCL where every process has an accelerator of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pf2lora.core.failures import ran_out
from pf2lora.errors import UserError, one_line


class ProcessLost(UserError):
    """Another process of the run has ended, or does not answer."""


@dataclass(frozen=True)
class Processes:
    """The processes that share a run's clients; `rank` is the number of this one, and the first writes and speaks.
    `on_device`: tensors of an accelerator travel from there, else through the host."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed's; None: that of all processes
    on_device: bool = False

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    # --- figures and files ----------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; one that JSON knows (numbers that are none, too)."""
        if self.alone:
            return [value]
        data = encoded(value)
        sizes = self.gather_equal(torch.tensor([len(data)]))
        room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        room[: len(data)] = data
        return [decoded(found[: int(size)]) for found, size in zip(self.gather_equal(room), sizes)]

    def from_first(self, value: Callable[[], Any]) -> Any:
        """What `value` gives in the first process, for all; one that JSON knows. What fails there fails in all."""
        if self.alone:
            return value()
        found = None
        with self.together():
            if self.first:
                found = value()
        return decoded(self.bytes_from_first(encoded(found) if self.first else None))

    def bytes_from_first(self, data: Tensor | None) -> Tensor:
        """The first process's bytes, for all."""
        if self.alone:
            assert data is not None
            return data
        size = torch.tensor([0 if data is None else len(data)])
        self.copy_first(size)
        data = torch.empty(int(size), dtype=torch.uint8) if data is None else data
        self.copy_first(data)
        return data

    def to_first(self, owner: int, data: Tensor | None) -> Tensor | None:
        """A tensor that the process `owner` has, for the first; None in the others. On the host."""
        if owner == 0 or self.rank not in (0, owner):
            return data if self.first else None
        if self.rank == owner:
            assert data is not None
            data = data.detach().cpu().contiguous()
            said = encoded([str(data.dtype).removeprefix("torch."), list(data.shape)])
            for part in (torch.tensor([len(said)]), said, data):
                self._call(dist.send, part, group_dst=0)
            return None
        size = self._received(torch.zeros(1, dtype=torch.int64), owner)
        dtype, shape = decoded(self._received(torch.empty(int(size), dtype=torch.uint8), owner))
        return self._received(torch.empty(shape, dtype=getattr(torch, dtype)), owner)

    def _received(self, place: Tensor, owner: int) -> Tensor:
        self._call(dist.recv, place, group_src=owner)
        return place

    # --- tensors --------------------------------------------------------------------------------------------

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same bits in each."""
        if self.alone or tensor.numel() == 0:
            return tensor
        travels = self._travelling(tensor).clone()
        self._call(dist.all_reduce, travels)
        return travels.to(tensor.device)

    def copy_first(self, tensor: Tensor) -> None:
        """The first process's numbers, written over those of the others."""
        if self.alone or tensor.numel() == 0:
            return
        travels = self._travelling(tensor).contiguous()
        self._call(dist.broadcast, travels, group_src=0)
        if not self.first and travels is not tensor:
            tensor.copy_(travels)

    def rows(self, tensor: Tensor, counts: list[int]) -> list[Tensor]:
        """The rows of every process; `counts` says how many each has."""
        if self.alone:
            return [tensor]
        room = tensor.new_zeros(max(counts), *tensor.shape[1:])
        room[: len(tensor)] = tensor
        found = self.gather_equal(room) if room.numel() else [room] * self.size
        return [rows[:count] for rows, count in zip(found, counts)]

    def gather_equal(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, all of one shape."""
        travels = self._travelling(tensor).contiguous()
        found = [torch.empty_like(travels) for _ in range(self.size)]
        self._call(dist.all_gather, found, travels)
        return [t.to(tensor.device) for t in found]

    def _travelling(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self.on_device else tensor.detach().cpu()

    def _call(self, collective: Callable[..., Any], *args: Any, **rest: Any) -> None:
        try:
            collective(*args, group=self.group, **rest)
        except (RuntimeError, ValueError) as error:  # a ValueError where the processes are being ended
            if ran_out(error):
                raise
            reason = re.sub(r"^\[\S*\] ", "", str(error)).partition(". ")[
                0
            ]  # gloo says its own line, and advice
            line = f"another process of the run has ended or does not answer ({one_line(reason)[:100]})"
            raise ProcessLost(line) from None

    # --- errors ---------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in one process fails in all of them: nobody waits for one that will not come."""
        if self.alone:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except ProcessLost:
            raise
        except Exception as caught:
            error = caught
        told = self.gather(None if error is None else [kind_of(error), one_line(error)])
        if error is not None:
            raise error
        for rank, found in enumerate(told):
            if found is not None:
                raise heard(rank, *found)


ALONE = Processes()


def kind_of(error: Exception) -> str:
    """As what an error is told to the others."""
    if isinstance(error, UserError):
        return "user"
    return "memory" if ran_out(error) else type(error).__name__


def heard(rank: int, kind: str, line: str) -> Exception:
    """An error of another process: of its kind where a run does something about it."""
    if kind == "memory":
        return torch.OutOfMemoryError(line)
    return UserError(line if kind == "user" else f"process {rank} failed: {kind}: {line}")


def encoded(value: Any) -> Tensor:
    """JSON as bytes."""
    return as_bytes(json.dumps(value).encode())


def decoded(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def as_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# --- this process among them -------------------------------------------------------------------------------


def current() -> Processes:
    """The processes that this one shares a run with, where they have been joined."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return Processes(dist.get_rank(), dist.get_world_size(), None, "nccl" in dist.get_backend_config())
