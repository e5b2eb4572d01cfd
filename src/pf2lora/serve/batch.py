"""The texts that are being written, each by its own client's model, in one pass for all of them.

Every row is a client of its own in the stacked layers (adapters/layers.py), so that rows of any clients share a pass.
Rows come and go between passes: newcomers read their prompts in a pass of their own and then join the others' cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.errors import UserError
from pf2lora.tasks.generation.sampling import Sampler, choose

Adapters = Callable[[str], tuple[Tensor, Tensor]]
"""A model name's common and personal adapter, (1, P) and (1, Q)."""


@dataclass(eq=False)  # two rows that ask the same are two rows
class Row:
    """A text that is being written: by whose model, after which prompt, and how its tokens are chosen."""

    model: str
    prompt: list[int]
    sampler: Sampler = field(default_factory=Sampler)
    last: int = -1  # the token that was chosen last, which the next pass reads


class RunningBatch:
    """The rows in the making, left-padded to one width, with what the model remembers of them."""

    def __init__(self, model: TwoLevelModel, adapters: Adapters, padding: int) -> None:
        self.model, self.adapters, self.padding = model, adapters, padding
        last_only = "logits_to_keep" in inspect.signature(model.model.forward).parameters
        self.options = {"logits_to_keep": 1} if last_only else {}
        self.binding = ExitStack()
        self.clear()

    def clear(self) -> None:
        """Forget all rows, and let go of the model."""
        self.binding.close()
        self.bound_to: list[str] = []
        self.rows: list[Row] = []
        self.cache = (
            DynamicCache()
        )  # without a config every layer keeps all tokens, and masks make the windows
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.model.model.device

    @torch.no_grad()
    def admit(self, rows: Sequence[Row]) -> None:
        """Read the newcomers' prompts, choose their first tokens, and let them join."""
        prompts = [torch.tensor(row.prompt, device=self.device) for row in rows]
        width = max(map(len, prompts))
        ids = torch.stack([left_filled(prompt, width, -1, self.padding) for prompt in prompts])
        mask = torch.stack([left_filled(torch.ones_like(prompt), width, -1) for prompt in prompts])
        cache = DynamicCache()
        self._pass(rows, ids, mask, cache)
        self.cache = joined(self.cache, cache) if self.rows else cache
        if self.rows:
            width = max(width, self.mask.shape[1])
            mask = torch.cat([left_filled(part, width, 1) for part in (self.mask, mask)])
        self.rows, self.mask = [*self.rows, *rows], mask

    @torch.no_grad()
    def step(self) -> None:
        """One more token for every row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1)
        ids = torch.tensor([[row.last] for row in self.rows], device=self.device)
        self._pass(self.rows, ids, self.mask, self.cache)

    def keep(self, rows: Sequence[Row]) -> None:
        """Let go of all rows but these, and of the columns that were only the others'."""
        if not rows:
            return self.clear()
        stay = [i for i, row in enumerate(self.rows) if row in rows]
        if len(stay) == len(self.rows):
            return None
        index = torch.tensor(stay, device=self.device)
        mask = self.mask[index]
        unused = int(mask.any(0).long().argmax())
        self.rows, self.mask = [self.rows[i] for i in stay], mask[:, unused:]
        self.cache = over_layers(self.cache, lambda states: states[index, :, unused:])
        return None

    def _pass(self, rows: Sequence[Row], ids: Tensor, mask: Tensor, cache: DynamicCache) -> None:
        """Read `ids` behind what the cache holds; each row gets its next token."""
        self._bind([row.model for row in rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = self.model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **self.options,
        ).logits[:, -1]
        for row, token in zip(rows, choose(logits, [row.sampler for row in rows])):
            row.last = token

    def _bind(self, models: list[str]) -> None:
        """The rows' adapters into the layers, where other rows' are in them."""
        if models == self.bound_to:
            return
        self.binding.close()
        common, personal = (torch.cat(parts).to(self.device) for parts in zip(*map(self.adapters, models)))
        self.binding.enter_context(self.model.bound(common, personal))
        self.bound_to = models


def left_filled(states: Tensor, width: int, dim: int, value: int = 0) -> Tensor:
    """Filled up on the left to `width` along `dim`."""
    missing = width - states.shape[dim]
    behind = [0, 0] * (-dim - 1 if dim < 0 else states.dim() - 1 - dim)
    return pad(states, [*behind, missing, 0], value=value) if missing else states


def joined(first: DynamicCache, second: DynamicCache) -> DynamicCache:
    """Two batches' caches as one: the narrower is filled up on the left, where its mask is 0."""
    width = max(first.get_seq_length(), second.get_seq_length())
    others = (states for layer in attention_layers(second) for states in (layer.keys, layer.values))
    return over_layers(
        first, lambda states: torch.cat([left_filled(s, width, 2) for s in (states, next(others))])
    )


def over_layers(cache: DynamicCache, function: Callable[[Tensor], Tensor]) -> DynamicCache:
    """A cache of `function` of each layer's keys and values (n, heads, tokens, size), in this order."""
    made = DynamicCache()
    for number, layer in enumerate(attention_layers(cache)):
        keys = function(layer.keys)
        made.update(keys, function(layer.values), number)
    return made


def attention_layers(cache: DynamicCache) -> list[Any]:
    """The cache's layers, if each holds keys and values of all tokens."""
    if not all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers):
        raise UserError(
            "this model remembers more than keys and values, and cannot write several texts at once"
        )
    return list(cache.layers)
