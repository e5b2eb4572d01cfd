"""The two-level adapter `W_k = W_0 + s·BA + s̃·D_kC_k` with a leading client axis, in any transformers model.

The frozen base model is held once. A batch is M·b examples, client by client; an adapted layer sees its input
as (M, b·T, n) and multiplies it with the stacked adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pf2lora.adapters import short_attention
from pf2lora.adapters.architectures import (
    ARCHITECTURES,
    HEADS,
    Architecture,
    keep_positions,
    needed_mask,
    packed_mask,
    within_windows,
)
from pf2lora.adapters.base_model import fresh_parameters
from pf2lora.adapters.first_state import factor_entries, first_values
from pf2lora.adapters.layer_passes import prepare_compiler, set_passes, stacked_layers
from pf2lora.adapters.layers import Adapted, ClientLinear, Part, Projection, aligned, precision, sizes
from pf2lora.adapters.output_layer import output_layer, target_losses
from pf2lora.adapters.spec import ALL_LINEAR, AdapterSpec
from pf2lora.adapters.targets import find_targets, split_parts
from pf2lora.core.factors import down, up
from pf2lora.core.failures import compiler_failed
from pf2lora.core.layout import Entry, Layout
from pf2lora.core.randomness import generator
from pf2lora.core.second_order import is_differentiated_twice
from pf2lora.errors import UserError, one_line

logger = logging.getLogger("pf2lora")
NOT_COMPILED = "its_compiler_failed"  # an attribute of the base model, which is adapted anew for every method


class TwoLevelModel:
    """A frozen transformers model whose target layers take M clients' adapters at once."""

    def __init__(self, model: PreTrainedModel, spec: AdapterSpec) -> None:
        self.model, self.spec = model, spec
        self.architecture = ARCHITECTURES.get(model.config.model_type, Architecture(()))
        model.requires_grad_(False)
        model.eval()  # the base model's own dropout stays off: its masks would depend on who shares the pass
        self.adapted = self._inject(find_targets(model, spec.targets, self.architecture))
        self.heads = self._stack_heads() if spec.head != "frozen" else {}
        keep_positions(model)
        self.common_layout, self.personal_layout = self._layouts()
        self.output_layer = output_layer(model)  # None: the model's loss is made of all its logits
        self.compiled: dict[nn.Module, Callable[..., Any]] = {}
        self.repeats_layers = self.compiles_layers = False

    def _inject(self, targets: list[str]) -> dict[str, Adapted]:
        adapted: dict[str, Adapted] = {}
        for number, name in enumerate(targets):
            base = self.model.get_submodule(name)
            assert isinstance(base, Projection)
            smallest = min(sizes(base))
            if self.spec.rank > smallest:
                raise UserError(
                    f"rank {self.spec.rank} is above the size of layer {name!r}, which is {smallest}"
                )
            layer = Adapted(base, self._parts(name, base), self.spec, number)
            self.model.set_submodule(name, layer)
            adapted[name] = layer
        if self.architecture.attention != "own" and not self.spec.dropout:
            for (name, layer), (other, after) in pairwise(adapted.items()):
                (parent, _, end), (same, _, other_end) = name.rpartition("."), other.rpartition(".")
                if parent == same and {end, other_end} == {
                    t.split(".")[-1] for t in self.architecture.targets
                }:
                    layer.shares_input_with = [after]  # query and value of one attention see the same input
        return adapted

    def _parts(self, name: str, base: Projection) -> list[Part]:
        if self.spec.targets == (ALL_LINEAR,):  # whole projections, as PEFT takes them
            return [Part(name, 0, sizes(base)[1])]
        return split_parts(name, base, self.architecture, self.model.config)

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
        last = [e for e in common if e.kind == "head" and e.module == common[-1].module]
        own += [e for e in last if e.parameter in self.spec.client_head]
        shared = sum(e.size for e in common) if self.spec.head == "shared" else adapter
        return Layout(tuple(common), shared), Layout(tuple(own), 0)

    def initial(
        self, seed: int, names: Sequence[str], dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """The first x and y: the same A for every client, each client its own C, as LoRA initialises A; B = D = 0.

        A head that the checkpoint holds starts from it, a new one as transformers starts it, by the seed. A client's
        own part of the head is added to it and starts from zero.
        """
        heads = {
            f"{name}.{which}": parameter
            for name, head in self.heads.items()
            for which, parameter in head.base.named_parameters()
            if f"{name}.{which}" not in fresh_parameters(self.model)
        }
        deviation = getattr(self.model.config, "initializer_range", 0.02)

        def row(layout: Layout, known: Mapping[str, Tensor], *owner: str) -> Tensor:
            values = [
                first_values(e, generator(seed, *owner, e.name), known, deviation) for e in layout.entries
            ]
            return torch.cat(values) if values else torch.zeros(0)

        common = row(self.common_layout, heads, "common").to(dtype).expand(len(names), -1).clone()
        zeros = {e.name: torch.zeros(e.size) for e in self.personal_layout.entries if e.kind == "head"}
        own = [row(self.personal_layout, zeros, "client", name) for name in names]
        return common, torch.stack(own).to(dtype)

    def __call__(
        self,
        common: Tensor,
        personal: Tensor,
        *,
        attention_mask: Tensor | None = None,
        key: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """The model's output for M clients' examples, client-major, with their adapters.

        The mask tells the tokens from the padding on their right; None: there is no padding.
        """
        return self._passed(lambda: self._run(self.model, common, personal, attention_mask, key, inputs))

    def token_losses(
        self,
        common: Tensor,
        personal: Tensor,
        following: Tensor,
        counted: Tensor,
        most: int | None,
        *,
        attention_mask: Tensor | None = None,
        key: Tensor | None = None,
        examples: Tensor | None = None,
        **inputs: Any,
    ) -> Tensor:
        """A language model's loss of the `following` token at every position that is `counted` (`target_losses`).
        Where rows hold several `examples`, their numbers say which token belongs to which."""
        inputs["use_cache"] = False
        if examples is not None:
            attention_mask = packed_mask(examples, self.dtype)
        layer = self.output_layer
        if layer is None:
            logits = self(common, personal, attention_mask=attention_mask, key=key, **inputs).logits
            flat = logits.flatten(0, 1).to(counted.dtype)
            return cross_entropy(flat, following.flatten(), reduction="none").view_as(counted) * counted

        def losses() -> Tensor:
            output = self._run(self.model.base_model, common, personal, attention_mask, key, inputs)
            return target_losses(layer, output.last_hidden_state, following, counted, most)

        found: Tensor = self._passed(losses)
        return found

    def _passed(self, run: Callable[[], Any]) -> Any:
        """What a pass gives. Where the compiler fails, it is run as it is, and so are those that follow."""
        try:
            return run()
        except Exception as error:
            if not ((self.compiled or self.compiles_layers) and compiler_failed(error)):
                raise
            failed = one_line(str(error).partition("\n\n")[0])[:300]  # advice follows, and commands' outputs
        logger.warning("the compiler failed, so that passes are run as they are: %s", failed)
        setattr(self.model, NOT_COMPILED, True)
        self.compiled, self.compiles_layers = {}, False
        self._set_passes()
        return run()

    def _run(
        self,
        module: nn.Module,
        common: Tensor,
        personal: Tensor,
        attention_mask: Tensor | None,
        key: Tensor | None,
        inputs: Mapping[str, Any],
    ) -> Any:
        if self.architecture.attention == "bidirectional":
            short_attention.take(self.model, self.dtype, common.device)
        fused = self.model.config._attn_implementation != "eager"
        length = inputs["input_ids"].shape[1]
        mask = attention_mask
        if mask is None or mask.dim() < 4:  # else it is ready-made
            mask = needed_mask(self.architecture, mask, self.dtype, common.device, length=length, fused=fused)
        ready: Tensor | dict[str, Tensor] | None = mask
        if self.architecture.attention == "causal":
            inputs = {"use_cache": False} | dict(inputs)  # layers that are run again would fill it twice
            ready = None if mask is None else within_windows(mask, self.model.config)
        with self.bound(common, personal, key):
            trains = torch.is_grad_enabled() and not is_differentiated_twice()
            run = self.compiled.get(module, module) if trains else module
            return run(attention_mask=ready, **inputs)

    def compile(self, lengths: int = 1) -> None:
        """Let torch compile the passes whose gradient is taken: fused kernels, after some seconds for each shape of a
        batch, of which there are so many `lengths`. Of a language model, which may be deep, one layer is compiled for
        all. Not where that has failed before."""
        if getattr(self.model, NOT_COMPILED, False):
            return
        prepare_compiler(lengths)
        if self.architecture.attention == "causal":
            self.compiles_layers = True
            self._set_passes()
        else:
            self.compiled = {self.model: torch.compile(self.model, dynamic=False)}

    def repeat_layers(self, on: bool = True) -> None:
        """Activation checkpointing: layers keep their input alone and are run again for a gradient. The same numbers,
        for up to a third more arithmetic; where a gradient is differentiated again, layers keep everything."""
        self.repeats_layers = on
        self._set_passes()

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Meanwhile passes are run as they are, for a mere measurement."""
        before = self.compiled, self.compiles_layers
        self.compiled, self.compiles_layers = {}, False
        self._set_passes()
        try:
            yield
        finally:
            self.compiled, self.compiles_layers = before
            self._set_passes()

    def _set_passes(self) -> None:
        if self.output_layer is not None:
            self.output_layer.set_passes(compiled=self.compiles_layers)
        for layer in stacked_layers(self.model, self.adapted):
            set_passes(layer, repeated=self.repeats_layers, compiled=self.compiles_layers)
        # What a layer hands to another is beyond a compiler that repeats it.
        hands_over = not (self.repeats_layers and (self.compiles_layers or self.compiled))
        for layer in self.adapted.values():
            layer.hands_over = hands_over

    @contextmanager
    def bound(self, common: Tensor, personal: Tensor, key: Tensor | None = None) -> Iterator[PreTrainedModel]:
        """The transformers model with the M clients' adapters in place, for calls of its own such as `generate`.

        Its batches are client-major; beam search repeats each example in place, which keeps them so.
        """
        factors, heads = self.factors(common, personal)
        for layer in self.adapted.values():
            layer.bind(factors, key)
        for head in self.heads.values():
            head.bind(heads)
        try:
            yield self.model
        finally:
            self.unbind()

    def factors(
        self, common: Tensor, personal: Tensor
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Every part's `[A; C] (M, R, n)` and `[sB, s̃D] (M, m, R)` in the base model's precision, and the head.

        Side by side, both adapters cost a layer one pair of small products; and all layers of one shape are put
        together, scaled and rounded as one block.
        """
        downs: list[Tensor] = []
        ups: list[Tensor] = []
        heads: dict[str, Tensor] = {}
        own = iter(self.personal_layout.blocks(personal))
        for run, block in zip(self.common_layout.runs, self.common_layout.blocks(common)):
            kind = run[0].kind
            if kind == "head":
                heads |= {entry.name: view for entry, view in zip(run, block.unbind(1))}
                continue
            of_client = next(own) if self.spec.client_rank else None
            if kind == "A":
                downs.extend(aligned(down(block, of_client).to(self.dtype), -2).unbind(1))
            else:
                both = up(block, of_client, self.spec.scaling, self.spec.client_scaling)
                ups.extend(aligned(both.to(self.dtype), -1).unbind(1))
        corrected = [run[0].name for run in self.personal_layout.runs if run[0].kind == "head"]
        for name, block in zip(corrected, own, strict=True):
            heads[name] = heads[name] + block[:, 0].to(heads[name])
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
        self.compiles_layers = self.repeats_layers = False
        self._set_passes()
        short_attention.leave(self.model)
        layers: dict[str, Adapted | ClientLinear] = {**self.adapted, **self.heads}
        for name, layer in layers.items():
            self.model.set_submodule(name, layer.base)

    @property
    def dtype(self) -> torch.dtype:
        """The base model's precision."""
        return precision(next(iter(self.adapted.values())).base)

    @property
    def layer_names(self) -> list[str]:
        """The adapted parts, in the order of the layouts: equal shapes together, within them as in the model."""
        return [e.module for e in self.common_layout.entries if e.kind == "A"]
