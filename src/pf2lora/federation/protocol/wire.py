"""How the numbers of the common adapter travel: as they are, or as changes in fewer bits.

In fewer bits x itself would lose what a round changes: of a number of 0.1, bfloat16 holds steps of 0.0005. So a site
sends how far it moved from what it was served, and what rounding leaves over goes with its next change (error feedback;
Seide et al., 2014, Karimireddy et al., 2019): with Q the rounding, v_k what site k would send, s_k what it was served,

    q_k = Q(v_k − s_k + e_k),   e_k ← v_k − s_k + e_k − q_k,   x ← x + Σ_k w_k q_k.

So x + Σ_k w_k e_k moves by Σ_k w_k (v_k − s_k), whatever Q is: nothing is lost, some of it is late. e_k stays at the
site, in its checkpoint. The server's x goes down as its change since what sites hold, h ← h + Q(x − h): what is rounded
off is in the next x − h. What the other end holds nothing of travels whole, in float32: the first round's, and x to a
site that was not in the round before.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from pf2lora.core.layout import Entry, Layout
from pf2lora.core.method import Method
from pf2lora.federation.protocol.messages import Malformed, check_tensors, cut, to_tensors
from pf2lora.federation.protocol.plan import Plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
BLOCK, LARGEST = 256, 127  # int8: numbers that share a scale, and how many steps it has to either side
SCALE = ".scale"  # what the name of an entry's scales ends with

Named = Mapping[str, Tensor]


class Memory(NamedTuple):
    """What a site keeps for the next change: what it was served last `(n,)`, and what rounding left over, by entry."""

    served: Tensor | None = None
    residual: Named = MappingProxyType({})


@dataclass(frozen=True)
class Wire:
    """The agreed precision. In a `private` run what leaves is a change already, and in a `masked` one whole numbers."""

    name: str = "float32"
    private: bool = False
    masked: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Wire:
        """The plan's."""
        return cls(plan.wire, plan.private, plan.masked)

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""
        return self.name == "float32"

    def changes(self, method: Method, number: int) -> frozenset[str]:
        """The entries of what leaves in round `number` that leave as rounded changes; the others leave whole."""
        if self.exact:
            return frozenset()
        leaves = method.leaves(number).by_name
        if self.private:
            return frozenset(leaves)
        return frozenset(leaves.keys() & method.arrives(number - 1).by_name) if number > 1 else frozenset()

    # --- up -------------------------------------------------------------------------------------------------

    def update(
        self, method: Method, number: int, sent: Tensor, rank: int | None, served: Named, residual: Named
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a site would send `(n,)` at the end of round `number`, as named tensors; and what rounding left over.
        `served` is what it began the round with, as it came."""
        leaves, changes = method.leaves(number), self.changes(method, number)
        if self.masked:
            return to_tensors(leaves, sent, rank, torch.int64), {}
        whole = to_tensors(leaves, sent, rank, sent.dtype)
        found, left = dict[str, Tensor](), dict(residual)
        for entry in leaves.entries:
            value = whole[entry.name]
            if entry.name not in changes:
                found[entry.name] = value.float()
                continue
            change = value.double() - self.begun(method, entry, served, value)
            if entry.name in residual:
                change += fitted(residual[entry.name], value)
            packed = self.packed(entry.name, change)
            found |= packed
            rest = (change - unpacked(packed, entry.name)).to(value)
            left[entry.name] = fitted(rest, torch.empty(entry.shape, dtype=value.dtype))
        return found, left

    def updated(
        self, method: Method, number: int, tensors: Named, served: Named
    ) -> Iterator[tuple[int, Tensor]]:
        """What a site sent in round `number`, from its tensors, checked, and what it was `served`: `update`'s other
        half, at the server. Entry by entry, where its numbers begin in the row `(n,)`, and they; what was truncated is
        zero again."""
        leaves, changes = method.leaves(number), self.changes(method, number)
        for entry in leaves.entries:
            value = unpacked(tensors, entry.name)
            if entry.name in changes:
                value = value + self.begun(method, entry, served, value)
            yield leaves.offsets[entry.name], fitted(value, torch.empty(entry.shape)).flatten()

    def begun(self, method: Method, entry: Entry, served: Named, like: Tensor) -> Tensor | float:
        """From where an entry's change counts, in the shape of `like`: what was served, if the entry is of x; what goes
        beside it (a control variate's change) is none of it."""
        if self.private or entry.name not in served or entry.name not in method.layout.by_name:
            return 0.0
        return fitted(served[entry.name], like)

    def check_update(self, method: Method, number: int, tensors: Named) -> None:
        """`Malformed` unless these are exactly what leaves in round `number`."""
        leaves, changes = method.leaves(number), self.changes(method, number)
        dtype = torch.int64 if self.masked else torch.float32
        truncated = type(method).ranks_of is not Method.ranks_of
        self.check(leaves, tensors, changes, dtype, truncated=truncated)

    # --- down -----------------------------------------------------------------------------------------------

    def answer(self, layout: Layout, x: Tensor, held: Tensor) -> dict[str, Tensor]:
        """The change from what sites hold `(n,)` to the server's x, laid out as `layout`, as named tensors."""
        found = dict[str, Tensor]()
        for entry in layout.entries:  # one by one: the difference is in float64
            at = slice(layout.offsets[entry.name], layout.offsets[entry.name] + entry.size)
            found |= self.packed(entry.name, (x[at].double() - held[at].double()).view(entry.shape))
        return found

    def check_answer(self, layout: Layout, tensors: Named, *, change: bool) -> None:
        """`Malformed` unless these are x, or a change of it, laid out as `layout`."""
        changes = layout.by_name if change and not self.exact else ()
        self.check(layout, tensors, changes, torch.float32, truncated=not change)

    # --- tensors --------------------------------------------------------------------------------------------

    def packed(self, name: str, change: Tensor) -> dict[str, Tensor]:
        """An entry's change in the agreed precision: one tensor, or for int8 two, with the size of a step for each
        block of numbers."""
        if self.name != "int8":
            return {name: change.to(DTYPES[self.name])}
        flat = change.double().flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scale = (blocks.abs().amax(1) / LARGEST).float()
        steps = blocks / scale.double().clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(1)
        numbers = steps.round().clamp(-LARGEST, LARGEST).to(torch.int8).flatten()[: len(flat)]
        return {name: numbers.view(change.shape).clone(), name + SCALE: scale}

    def check(
        self,
        layout: Layout,
        tensors: Named,
        changes: Collection[str],
        dtype: torch.dtype,
        *,
        truncated: bool,
    ) -> None:
        """`Malformed` unless `tensors` are the entries of `layout`, `changes` in the agreed precision with their
        scales, the others whole in `dtype`."""
        scaled = [name for name in changes if self.name == "int8"]
        numbers = {name: t for name, t in tensors.items() if name.removesuffix(SCALE) not in scaled}
        numbers |= {name: tensors[name] for name in scaled if name in tensors}
        dtypes = {name: DTYPES[self.name] if name in changes else dtype for name in layout.by_name}
        check_tensors(layout, numbers, dtypes, truncated=truncated)
        for name in scaled:
            if name + SCALE not in tensors:
                raise Malformed(f"the tensor {name + SCALE!r} is missing")
            scale, count = tensors[name + SCALE], -(-tensors[name].numel() // BLOCK)
            if scale.dtype != torch.float32 or tuple(scale.shape) != (count,):
                raise Malformed(f"the tensor {name + SCALE!r} is not {count} numbers of float32")
            if not bool(torch.isfinite(scale).all()) or bool((scale < 0).any()):
                raise Malformed(f"the tensor {name + SCALE!r} has values that are negative or not finite")
            if bool((tensors[name] < -LARGEST).any()):
                raise Malformed(f"the tensor {name!r} has values below {-LARGEST}")

    def size(self, count: int, *, change: bool) -> int:
        """The bytes of an entry of `count` numbers."""
        if self.masked or self.exact or not change:
            return (8 if self.masked else 4) * count
        return DTYPES[self.name].itemsize * count + (4 * -(-count // BLOCK) if self.name == "int8" else 0)


def unpacked(tensors: Named, name: str) -> Tensor:
    """An entry's numbers in float32, of tensors that were checked."""
    numbers = tensors[name].float()
    if name + SCALE not in tensors:
        return numbers
    scale = tensors[name + SCALE].repeat_interleave(BLOCK)[: numbers.numel()]
    return numbers * scale.view(numbers.shape)


def fitted(tensor: Tensor, like: Tensor) -> Tensor:
    """The first rows and columns of a tensor in the shape of `like`; zeros where it has none (a rank changed)."""
    if tensor.shape == like.shape:
        return tensor
    both = tuple(min(sizes) for sizes in zip(tensor.shape, like.shape))
    found = torch.zeros(like.shape, dtype=tensor.dtype)
    cut(found, both)[...] = cut(tensor, both)
    return found


def moved(layout: Layout, held: Tensor, tensors: Named) -> Tensor:
    """What a site held `(n,)` and the change that came, in float32: the same at both ends, to the last bit."""
    found = held.clone()
    for entry in layout.entries:
        at = layout.offsets[entry.name]
        found[at : at + entry.size] += unpacked(tensors, entry.name).flatten()
    return found


def checksum(held: Tensor) -> int:
    """By which both ends see that they hold the same."""
    return zlib.crc32(held.contiguous().numpy().data)
