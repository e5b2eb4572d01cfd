"""The two-level adapter `W_k = W_0 + s·BA + s̃·D_kC_k` with a leading client axis, in any transformers model.

The frozen base model is held once. A batch is M·b examples, client by client; an adapted layer sees its input
as (M, b·T, n) and multiplies it with the stacked adapters.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pf2lora.architectures import (
    ARCHITECTURES,
    HEADS,
    Architecture,
    needed_mask,
    stack_relative_positions,
)
from pf2lora.errors import UserError
from pf2lora.layout import Entry, Kind, Layout
from pf2lora.models import fresh_parameters
from pf2lora.randomness import generator, keep_mask
from pf2lora.second_order import is_differentiated_twice


@dataclass(frozen=True)
class AdapterSpec:
    """`client_rank` 0 leaves out D_kC_k. `scaling` and `client_scaling` are s and s̃ (lora_alpha / r).

    `targets` are module names, name endings or patterns (`*.3.*.query`); empty takes the architecture's query
    and value. `head` is trained with x and averaged ("shared"), trained and never sent ("personal"), or "frozen".
    """

    rank: int = 8
    client_rank: int = 2
    scaling: float = 1.0
    client_scaling: float = 1.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    head: str = "shared"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"rank is {self.rank}; it must be at least 1")
        if not 0 <= self.client_rank < self.rank:
            raise UserError(
                f"client_rank is {self.client_rank} and rank {self.rank}; the client's adapter is the smaller one: "
                f"0 <= client_rank < rank"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; it must lie in [0, 1)")
        if self.head not in ("shared", "personal", "frozen"):
            raise UserError(f"head is {self.head!r}; it must be 'shared', 'personal' or 'frozen'")


@dataclass(frozen=True)
class Part:
    """An adapted slice of a layer's output. A plain projection is one part; GPT-2's c_attn holds q, k and v."""

    name: str
    start: int
    stop: int


class Adapted(nn.Module):
    """A frozen linear layer plus the stacked adapters that `TwoLevelModel` binds for each pass."""

    def __init__(
        self, base: nn.Linear | Conv1D, parts: Sequence[Part], spec: AdapterSpec, number: int
    ) -> None:
        super().__init__()
        self.base = base
        self.parts = tuple(parts)
        self.spec = spec
        self.number = number  # tells the dropout masks of layers apart
        self.in_features, self.out_features = sizes(base)
        self.factors: tuple[Tensor, Tensor] | None = None  # (M, R, n) and (M, m, R) of all parts
        self.key: Tensor | None = None
        self.beside: list[
            Adapted
        ] = []  # the layer that gets the same input next (a list: it is no submodule)
        self.handed: tuple[Tensor, Tensor] | None = (
            None  # an input, and what the layer before made of it for us
        )

    def bind(self, factors: Mapping[str, tuple[Tensor, Tensor]], key: Tensor | None) -> None:
        """Take the adapters of M clients. The parts of a fused projection become one pair, block by block."""
        self.key = key
        downs, ups = zip(*(factors[part.name] for part in self.parts))
        if len(self.parts) == 1:
            self.factors = downs[0], ups[0]
            return
        ranks = [down.shape[1] for down in downs]
        blocks = [
            pad(up, (sum(ranks[:i]), sum(ranks[i + 1 :]), part.start, self.out_features - part.stop))
            for i, (part, up) in enumerate(zip(self.parts, ups))
        ]
        self.factors = torch.cat(downs, dim=1), sum(blocks[1:], blocks[0])

    def unbind(self) -> None:
        self.factors = self.key = self.handed = None

    def forward(self, u: Tensor) -> Tensor:
        out = self.base(u)
        if self.factors is None:
            return out
        clients = self.factors[0].shape[0]
        if u.shape[0] % clients:
            raise ValueError(f"a batch of {u.shape[0]} examples cannot be shared out among {clients} clients")
        grouped = out.view(clients, -1, self.out_features)
        return torch.baddbmm(grouped, self.narrow(u), self.factors[1].mT).view(out.shape)

    def narrow(self, u: Tensor) -> Tensor:
        """`u [A; C]ᵀ (M, rows, R)`: computed here, or already by the layer before, which has the same input."""
        assert self.factors is not None
        if self.handed is not None and self.handed[0] is u:
            inner, self.handed = self.handed[1], None
            return inner
        clients, rank = self.factors[0].shape[:2]
        grouped = u.reshape(clients, -1, self.in_features)
        if self.key is not None and self.spec.dropout:
            mask = keep_mask(self.key, self.number, u.shape, self.spec.dropout)
            grouped = grouped * mask.view_as(grouped).to(u.dtype) / (1 - self.spec.dropout)
        if not self.beside or self.beside[0].factors is None:
            return grouped @ self.factors[0].mT
        both = grouped @ torch.cat([self.factors[0], self.beside[0].factors[0]], dim=1).mT
        self.beside[0].handed = u, both[..., rank:]
        return both[..., :rank]

    def per_client(self, u: Tensor) -> Tensor:
        """The layer's output for one input `(1, T, n)` that all clients share: `(M, T, m)`."""
        out = self.base(u)
        if self.factors is None:
            return out
        down, up = self.factors
        return torch.baddbmm(out.expand(len(down), -1, -1), u.expand(len(down), -1, -1) @ down.mT, up.mT)


class ClientLinear(nn.Module):
    """A trainable linear layer of the head: its own weights for every client."""

    def __init__(self, base: nn.Linear, name: str) -> None:
        super().__init__()
        self.base, self.name = base, name
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def bind(self, x: dict[str, Tensor]) -> None:
        self.weight, self.bias = x[f"{self.name}.weight"], x.get(f"{self.name}.bias")

    def unbind(self) -> None:
        self.weight = self.bias = None

    def forward(self, u: Tensor) -> Tensor:
        if self.weight is None:
            return self.base(u)
        # The head is small and its logits decide: it runs in its own precision, not in the base model's.
        grouped = u.reshape(self.weight.shape[0], -1, u.shape[-1]).to(self.weight.dtype)
        out = grouped @ self.weight.mT
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        return out.view(*u.shape[:-1], out.shape[-1])


def sizes(layer: nn.Module) -> tuple[int, int]:
    """The input and output size of a linear layer; GPT-2's Conv1D keeps its weight transposed."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


class TwoLevelModel:
    """A frozen transformers model whose target layers take M clients' adapters at once."""

    def __init__(self, model: PreTrainedModel, spec: AdapterSpec) -> None:
        self.model, self.spec = model, spec
        self.architecture = ARCHITECTURES.get(model.config.model_type, Architecture(()))
        model.requires_grad_(False)
        model.eval()  # the base model's own dropout stays off: its masks would depend on who shares the pass
        self.adapted = self._inject(find_targets(model, spec.targets, self.architecture))
        self.heads = self._stack_heads() if spec.head != "frozen" else {}
        if model.config.model_type == "deberta-v2":
            stack_relative_positions(model)
        self.x, self.y = self._layouts()
        self.compiled: Callable[..., Any] | None = None

    def _inject(self, targets: list[str]) -> dict[str, Adapted]:
        adapted: dict[str, Adapted] = {}
        for number, name in enumerate(targets):
            base = self.model.get_submodule(name)
            assert isinstance(base, (nn.Linear, Conv1D))
            smallest = min(sizes(base))
            if self.spec.rank > smallest:
                raise UserError(
                    f"rank {self.spec.rank} is above the size of layer {name!r}, which is {smallest}"
                )
            layer = Adapted(base, split_parts(name, base, self.architecture), self.spec, number)
            self.model.set_submodule(name, layer)
            adapted[name] = layer
        if self.architecture.attention != "own" and not self.spec.dropout:
            for (name, layer), (other, after) in pairwise(adapted.items()):
                (parent, _, end), (same, _, other_end) = name.rpartition("."), other.rpartition(".")
                if parent == same and {end, other_end} == set(self.architecture.targets):
                    layer.beside = [after]  # query and value of one attention see the same input
        return adapted

    @property
    def head_roots(self) -> list[str]:
        """The modules that make up the task's head."""
        return [n for n, _ in self.model.named_children() if n in HEADS + self.architecture.extra_head]

    def _stack_heads(self) -> dict[str, ClientLinear]:
        heads: dict[str, ClientLinear] = {}
        for root in self.head_roots:
            for name, module in list(self.model.get_submodule(root).named_modules(prefix=root)):
                if isinstance(module, nn.Linear):
                    self.model.set_submodule(name, ClientLinear(module, name))
                    heads[name] = self.model.get_submodule(name)  # type: ignore[assignment]
                elif next(module.parameters(recurse=False), None) is not None:
                    raise UserError(
                        f"the head's module {name!r} is a {type(module).__name__}; only linear layers can be trained "
                        f"per client: use head = 'frozen'"
                    )
        return heads

    def _layouts(self) -> tuple[Layout, Layout]:
        shapes = {
            p.name: (p.stop - p.start, layer.in_features)
            for layer in self.adapted.values()
            for p in layer.parts
        }
        common = factor_entries(shapes, "A", "B", self.spec.rank)
        own = factor_entries(shapes, "C", "D", self.spec.client_rank) if self.spec.client_rank else []
        adapter = sum(e.size for e in common)
        for name, head in self.heads.items():
            common += [
                Entry(name, "head", tuple(p.shape), which) for which, p in head.base.named_parameters()
            ]
        shared = sum(e.size for e in common) if self.spec.head == "shared" else adapter
        return Layout(tuple(common), shared), Layout(tuple(own), 0)

    def initial(
        self, seed: int, names: Sequence[str], dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """The first x and y: the same A for every client, each client its own C, as LoRA initialises A; B = D = 0.

        A head that the checkpoint holds starts from it, a new one as transformers starts it, by the seed.
        """
        heads = {
            f"{name}.{which}": parameter
            for name, head in self.heads.items()
            for which, parameter in head.base.named_parameters()
            if f"{name}.{which}" not in fresh_parameters(self.model)
        }
        deviation = getattr(self.model.config, "initializer_range", 0.02)

        def row(layout: Layout, *owner: str) -> Tensor:
            values = [
                first_values(e, generator(seed, *owner, e.name), heads, deviation) for e in layout.entries
            ]
            return torch.cat(values) if values else torch.zeros(0)

        x = row(self.x, "common").to(dtype).expand(len(names), -1).clone()
        return x, torch.stack([row(self.y, "client", name) for name in names]).to(dtype)

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        attention_mask: Tensor | None = None,
        key: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The model's output for M clients' examples, client-major, with their adapters.

        The mask tells the tokens from the padding on their right; None: there is no padding.
        """
        mask = needed_mask(self.architecture, attention_mask, self.dtype)
        with self.bound(x, y, key) as model:
            fast = self.compiled is not None and not is_differentiated_twice()
            return (self.compiled if fast else model)(attention_mask=mask, **inputs)  # type: ignore[misc]

    def compile(self) -> None:
        """Let torch compile the model's passes: fused kernels, after some seconds for each shape of a batch."""
        self.compiled = torch.compile(self.model, dynamic=False)

    @contextmanager
    def bound(self, x: Tensor, y: Tensor, key: Tensor | None = None) -> Iterator[PreTrainedModel]:
        """The transformers model with the M clients' adapters in place, for calls of its own such as `generate`.

        Its batches are client-major; beam search repeats each example in place, which keeps them so.
        """
        factors, heads = self.factors(x, y)
        for layer in self.adapted.values():
            layer.bind(factors, key)
        for head in self.heads.values():
            head.bind(heads)
        try:
            yield self.model
        finally:
            self.unbind()

    def factors(self, x: Tensor, y: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Every part's `[A; C] (M, R, n)` and `[sB, s̃D] (M, m, R)` in the base model's precision, and the head.

        Side by side, both adapters cost a layer one pair of small products; and all layers of one shape are put
        together, scaled and rounded as one block.
        """
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        heads: dict[str, Tensor] = {}
        own = iter(self.y.blocks(y))
        for run, block in zip(self.x.runs, self.x.blocks(x)):
            kind = run[0].kind
            if kind == "head":
                heads |= {entry.name: view for entry, view in zip(run, block.unbind(1))}
                continue
            if kind == "B":
                block = block * self.spec.scaling if self.spec.scaling != 1 else block
            if self.spec.client_rank:
                beside = next(own)
                if kind == "B" and self.spec.client_scaling != 1:
                    beside = beside * self.spec.client_scaling
                block = torch.cat([block, beside], dim=-1 if kind == "B" else -2)
            block = aligned(block.to(self.dtype), -1 if kind == "B" else -2)
            (ups if kind == "B" else downs).extend(block.unbind(1))
        return dict(zip(self.layer_names, zip(downs, ups))), heads

    def unbind(self) -> None:
        """Forget the adapters: the model is the frozen base again, and no graph is kept alive."""
        for layer in self.adapted.values():
            layer.unbind()
        for head in self.heads.values():
            head.unbind()

    def remove(self) -> None:
        """Give the base model its own layers back, so that it can be adapted anew."""
        self.unbind()
        layers: dict[str, Adapted | ClientLinear] = {**self.adapted, **self.heads}
        for name, layer in layers.items():
            self.model.set_submodule(name, layer.base)

    @property
    def dtype(self) -> torch.dtype:
        """The base model's precision."""
        return next(iter(self.adapted.values())).base.weight.dtype

    @property
    def layer_names(self) -> list[str]:
        """The adapted parts, in the order of the layouts: equal shapes together, within them as in the model."""
        return [e.module for e in self.x.entries if e.kind == "A"]


def aligned(block: Tensor, dim: int) -> Tensor:
    """The rank filled up with zeros to a multiple of 8 on a CUDA device in 16 bits, whose fast products need that."""
    missing = -block.shape[dim] % 8
    if not missing or block.device.type != "cuda" or block.element_size() != 2:
        return block
    return pad(block, (0, missing) if dim == -1 else (0, 0, 0, missing))


def factor_entries(shapes: Mapping[str, tuple[int, int]], down: Kind, up: Kind, rank: int) -> list[Entry]:
    """The factors of layers `(m, n)`: equal shapes side by side, all of one kind before the other."""
    order = list(dict.fromkeys(shapes.values()))
    names = sorted(shapes, key=lambda name: order.index(shapes[name]))
    return [Entry(name, down, (rank, shapes[name][1])) for name in names] + [
        Entry(name, up, (shapes[name][0], rank)) for name in names
    ]


def first_values(
    entry: Entry, random: torch.Generator, heads: Mapping[str, Tensor], deviation: float
) -> Tensor:
    """A and C Kaiming-uniform with a = √5, as LoRA does: uniform in ±1/√n; B and D zero; a new head normal."""
    if entry.name in heads:
        return heads[entry.name].detach().cpu().flatten()
    if entry.kind in ("B", "D") or entry.parameter == "bias":
        return torch.zeros(entry.size)
    if entry.kind == "head":
        return torch.randn(entry.size, generator=random) * deviation
    bound = 1 / math.sqrt(entry.shape[1])
    return (torch.rand(entry.size, generator=random) * 2 - 1) * bound


def split_parts(name: str, base: nn.Module, architecture: Architecture) -> list[Part]:
    out = sizes(base)[1]
    if not (architecture.fused and any(name.endswith(t) for t in architecture.targets)):
        return [Part(name, 0, out)]
    width = out // len(architecture.fused)
    return [
        Part(f"{name}.{part}", i * width, (i + 1) * width)
        for i, part in enumerate(architecture.fused)
        if part in architecture.adapted_parts
    ]


def find_targets(model: nn.Module, wanted: Sequence[str], architecture: Architecture) -> list[str]:
    """The linear layers that `wanted` names, by name, ending or pattern; the architecture's default without."""
    head = HEADS + architecture.extra_head
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.split(".")[0] not in head
    ]
    patterns = list(wanted) or list(architecture.targets)
    found = [n for n in linear if any(matches(n, p) for p in patterns)]
    unmatched = [p for p in patterns if not any(matches(n, p) for n in linear)]
    if unmatched or not found:
        candidates = sorted({n.split(".")[-1] for n in linear})
        what = (
            f"no layer matches the target {unmatched[0]!r}" if unmatched else "no default targets are known"
        )
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise UserError(
            f"{what} in this model ({kind}); linear layers to choose from: {', '.join(candidates)}"
        )
    return found


def matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatch.fnmatchcase(name, pattern)
