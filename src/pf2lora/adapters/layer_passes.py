"""How a model's layers are run: as they are, compiled, or *repeated*: a layer keeps its input alone, and is run again
when a gradient needs the rest (activation checkpointing).

Dropout masks follow from a batch's key (`core/randomness.py`), so that nothing random has to be kept for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from pf2lora.adapters.layers import Adapted
from pf2lora.core.second_order import is_differentiated_twice

SHAPES = 64  # of batches, for each of which a layer is compiled anew, at least
SHAPES_PER_LENGTH = (
    4  # a last pass may have fewer clients than the others, and either may have padding or none
)


def stacked_layers(model: nn.Module, adapted: Iterable[str]) -> list[nn.Module]:
    """The layers that follow each other in the lists which hold the `adapted` modules."""
    lists: dict[str, nn.ModuleList] = {}
    for name in adapted:
        parts = name.split(".")
        for i in range(1, len(parts)):
            found = model.get_submodule(".".join(parts[:i]))
            if isinstance(found, nn.ModuleList):
                lists[".".join(parts[:i])] = found
                break
    return [layer for found in lists.values() for layer in found]


def prepare_compiler(lengths: int) -> None:
    """Let torch compile a pass for batches of so many lengths: beyond its limit it would run them as they are, and not
    say so. The gradient's part is compiled with the pass and not when it is first taken, where a compiler that fails at
    it would end the step."""
    shapes, limits = max(SHAPES, SHAPES_PER_LENGTH * lengths), torch._dynamo.config
    limits.recompile_limit = max(shapes, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(4 * shapes, limits.accumulated_recompile_limit)
    if hasattr(functorch_config, "force_non_lazy_backward_lowering"):  # not in older versions of torch
        functorch_config.force_non_lazy_backward_lowering = True


def set_passes(layer: nn.Module, *, repeated: bool, compiled: bool) -> None:
    """Run a layer in one way or another from now on, where a gradient is taken: of answers and texts nearly every pass
    has a shape of its own, for which nothing is compiled. What is differentiated twice is run as it is, too: neither a
    compiled nor a repeated layer has a second derivative.

    One layer's compiled code serves all of its kind, so that a deep model takes no longer to compile than a flat one.
    """
    layer.__dict__.pop("forward", None)
    if not (repeated or compiled):
        return
    plain = layer.forward
    adapted = [module for module in layer.modules() if isinstance(module, Adapted)]

    def repeat(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    if compiled:
        fast = torch.compile(repeat if repeated else plain, dynamic=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the whole model: the compiler repeats operations, not a function
            return repeat(*args, **kwargs) if repeated else plain(*args, **kwargs)
        if is_differentiated_twice() or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if compiled:
            return fast(*args, **kwargs)
        again = bound_again(plain, adapted)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = forward


def bound_again(plain: Callable[..., Any], adapted: list[Adapted]) -> Callable[..., Any]:
    """`plain` with the adapters that are bound now: when it is run again, the pass is over and they no longer are."""
    bound = [(module.factors, module.key) for module in adapted]

    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(module.factors, module.key) for module in adapted]
        for module, (factors, key) in zip(adapted, bound):
            module.factors, module.key = factors, key
        try:
            return plain(*args, **kwargs)
        finally:
            for module, (factors, key) in zip(adapted, before):
                module.factors, module.key, module.handed = factors, key, None

    return run
