"""The models that a run is served as, by name: each client's deployed one, the common one, and the base model."""

from __future__ import annotations

import torch
from torch import Tensor

from pf2lora.errors import UserError
from pf2lora.run.saved import LoadedRun
from pf2lora.tasks.generation.task import Generation

COMMON, BASE = "common", "base"

Adapters = dict[str, tuple[Tensor, Tensor]]


def own_names(loaded: LoadedRun) -> dict[str, str]:
    """What the common and the base model are called: so, or with a colon before it, which no client's name holds, where
    a client is called so. Neither may pass for the other: any token opens the one, and the client's the other."""
    return {what: f":{what}" if what in loaded.saved.clients else what for what in (COMMON, BASE)}


def served_models(loaded: LoadedRun) -> Adapters:
    """Each name's common and personal adapter, (1, P) and (1, Q), on the host: only those in use are on the device.

    The base model without adapters can be asked only where no head is trained: a new head would know nothing.
    """
    found: Adapters = {}
    common, base = own_names(loaded).values()
    if (loaded.where / "state" / "common.safetensors").exists():
        found[common] = on_host(loaded.common())
    for name in loaded.saved.clients:
        if loaded.saved.shares_one_model and not loaded.joined_later(name):
            found[name] = found[common]
        elif loaded.file_of(name).exists():  # a federation's lead has none of the sites' own
            found[name] = on_host(loaded.client(name))
    if isinstance(loaded.task, Generation):
        nothing = torch.zeros(1, loaded.model.common_layout.size), loaded.no_personal()
        found[base] = on_host(nothing)
    if not found:
        raise UserError(f"{loaded.folder}: there is no adapter in it to be served")
    return found


def on_host(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].cpu(), pair[1].cpu()
