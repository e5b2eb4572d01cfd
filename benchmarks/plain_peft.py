"""The plain way: a PEFT model with two active adapters, clients one by one, as one would write it without this project.

The base model is held once; a client's adapters and head are ordinary parameters that are put in place when its turn
comes. PEFT refuses two active adapters on a model whose head it wraps, so the head stays a plain module of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, LoraModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from pf2lora.adapters.layers import Adapted
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.layout import Kind

Slot = tuple[nn.Module, str]
"""A module and the name of its parameter."""


@dataclass
class PlainClient:
    """What one client trains: x (common adapter and head) by AdamW, y (its own adapter) by SGD."""

    x: list[Parameter]
    y: list[Parameter]
    optimizer: torch.optim.AdamW


def one_lora(layer: Adapted, factors: dict[str, Tensor], down: Kind, up: Kind) -> tuple[Tensor, Tensor]:
    """The adapters of a layer's parts as one LoRA of the whole layer: A's rows stacked, B block by block.

    PEFT adapts GPT-2's fused c_attn as a whole; this project its q and v apart, each with its own A and B. One LoRA
    of twice the rank holds both, with zeros where q would meet v.
    """
    A = torch.cat([factors[f"{part.name}.{down}"] for part in layer.parts])
    B = A.new_zeros(layer.out_features, A.shape[0])
    rank = A.shape[0] // len(layer.parts)
    for i, part in enumerate(layer.parts):
        B[part.start : part.stop, i * rank : (i + 1) * rank] = factors[f"{part.name}.{up}"]
    return A, B


class PlainLoop:
    """The base model of `described` under PEFT, with the same adapters as `described`, for one client at a time.

    With `masked`, the zeros of `one_lora` stay zero, so that the losses can be compared; a user trains them too, and
    so does this loop where it is timed.
    """

    def __init__(
        self,
        described: TwoLevelModel,
        *,
        lr: float,
        client_lr: float,
        weight_decay: float,
        masked: bool = False,
    ) -> None:
        described.remove()
        self.described, self.base = described, described.model
        self.lr, self.client_lr, self.weight_decay = lr, client_lr, weight_decay
        spec, layers = described.spec, described.adapted
        parts = len(next(iter(layers.values())).parts)
        self.ranks = {"common": spec.rank * parts}
        if spec.client_rank:
            self.ranks["client"] = spec.client_rank * parts
        self.model = get_peft_model(self.base, self.lora("common"), adapter_name="common")
        if "client" in self.ranks:
            self.model.add_adapter("client", self.lora("client"))
        tuner = self.model.base_model
        assert isinstance(tuner, LoraModel)
        tuner.set_adapter(list(self.ranks))
        self.head = [
            (self.base.get_submodule(e.module), e.parameter)
            for e in described.common_layout.entries
            if e.kind == "head"
        ]
        self.own_head = [getattr(module, name) for module, name in self.head]
        self.x_slots = self.slots("common") + self.head
        self.y_slots = self.slots("client") if "client" in self.ranks else []
        self.masks = self.gradient_masks() if masked and parts > 1 else None
        # A float32 head on a bfloat16 base model, as the adapters are.
        self.casts = [
            self.base.get_submodule(root).register_forward_pre_hook(
                lambda _, inputs: (inputs[0].float(), *inputs[1:])
            )
            for root in described.head_roots
        ]

    def lora(self, adapter: str) -> LoraConfig:
        rank = self.ranks[adapter]
        transposed = isinstance(next(iter(self.described.adapted.values())).base, Conv1D)
        targets = list(self.described.adapted)
        return LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=transposed)

    def slots(self, adapter: str) -> list[Slot]:
        found: list[Slot] = []
        for name in self.described.adapted:
            layer = self.base.get_submodule(name)
            assert isinstance(layer, LoraLayer)
            found += [(layer.lora_A[adapter], "weight"), (layer.lora_B[adapter], "weight")]
        return found

    def gradient_masks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Ones where the adapters of the parts are, for x and for y."""
        ones = [
            {e.name: torch.ones(e.shape, device=self.base.device) for e in layout.entries}
            for layout in (self.described.common_layout, self.described.personal_layout)
        ]
        return self.adapters(ones[0], "A", "B"), self.adapters(ones[1], "C", "D") if ones[1] else []

    def adapters(self, factors: dict[str, Tensor], down: Kind, up: Kind) -> list[Tensor]:
        return [t for layer in self.described.adapted.values() for t in one_lora(layer, factors, down, up)]

    def client(self, x: Tensor, y: Tensor) -> PlainClient:
        """A client that starts from its rows of x and y."""
        common = {name: t[0] for name, t in self.described.common_layout.unpack(x.unsqueeze(0)).items()}
        own = {name: t[0] for name, t in self.described.personal_layout.unpack(y.unsqueeze(0)).items()}
        head = [common[e.name].clone() for e in self.described.common_layout.entries if e.kind == "head"]
        xs = [Parameter(t) for t in self.adapters(common, "A", "B") + head]
        ys = [Parameter(t) for t in self.adapters(own, "C", "D")] if own else []
        return PlainClient(xs, ys, torch.optim.AdamW(xs, lr=self.lr, weight_decay=self.weight_decay))

    def seat(self, slots: Sequence[Slot], parameters: Sequence[Parameter]) -> None:
        for (module, name), parameter in zip(slots, parameters):
            setattr(module, name, parameter)

    def turn_of(self, client: PlainClient) -> None:
        """Put the client's parameters in place."""
        self.seat(self.x_slots, client.x)
        self.seat(self.y_slots, client.y)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: t for name, t in batch.items() if name != "target"}
        loss: Tensor = self.model(**({"labels": batch["input_ids"]} | inputs)).loss
        return loss

    def homlora(self, client: PlainClient, batch: dict[str, Tensor]) -> Tensor:
        """One step of HOMLoRA, on the fastest ordinary attention."""
        loss = self.loss(batch)
        loss.backward()
        self.give([p.grad for p in client.x if p.grad is not None], client)
        client.optimizer.step()
        client.optimizer.zero_grad()
        return loss.detach()

    def pf2lora(
        self, client: PlainClient, inner: dict[str, Tensor], outer: dict[str, Tensor], *, second_order: bool
    ) -> Tensor:
        """One step of PF2LoRA by the paper's pseudocode; the exact second-order term by double backward.

        y⁺ are new parameters, not the old ones changed in place: the graph of the first gradient, which is
        differentiated again, still needs the old ones.
        """
        loss = self.loss(inner)
        lower = torch.autograd.grad(loss, client.y, create_graph=second_order)
        step = self.masked([g.detach() for g in lower], 1)
        with torch.no_grad():
            moved = torch._foreach_sub(list[Tensor](client.y), step, alpha=self.client_lr)
        client.y = [Parameter(t) for t in moved]
        self.seat(self.y_slots, client.y)
        gradients = torch.autograd.grad(self.loss(outer), client.x + (client.y if second_order else []))
        hyper = gradients[: len(client.x)]
        if second_order:
            v = self.masked(gradients[len(client.x) :], 1)
            second = torch.autograd.grad(lower, client.x, v, materialize_grads=True)
            hyper = torch._foreach_sub(hyper, second, alpha=self.client_lr)
        self.give(hyper, client)
        client.optimizer.step()
        return loss.detach()

    def masked(self, gradients: Sequence[Tensor], which: int) -> list[Tensor]:
        if self.masks is None:
            return list(gradients)
        return [gradient * mask for gradient, mask in zip(gradients, self.masks[which], strict=True)]

    def give(self, gradients: Sequence[Tensor], client: PlainClient) -> None:
        for parameter, gradient in zip(client.x, self.masked(gradients, 0)):
            parameter.grad = gradient

    def remove(self) -> None:
        """Give the base model its own layers and head back."""
        for cast in self.casts:
            cast.remove()
        self.seat(self.head, self.own_head)
        self.model.unload()
        self.base.requires_grad_(False)
