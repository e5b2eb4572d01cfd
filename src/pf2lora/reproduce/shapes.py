"""Parameters, operations and what is sent, counted on a model of a given shape: no weights, no data, no training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from pf2lora.adapters.base_model import load
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.method import Method, Surroundings
from pf2lora.engines.batches import Batch
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.reproduce.preset import Run
from pf2lora.run import costs
from pf2lora.run.config import Config
from pf2lora.run.set_up import adapter_spec, method_in, method_table

BASELINE = "homlora"  # what the ratio of operations is to


def count(run: Run, model: str | None = None) -> dict[str, dict[str, float]]:
    """By quantity and method; `model` is one whose shape is taken in place of the run's."""
    config = replace(run.config, adapter=replace(run.config.adapter, head="frozen"))
    shape = load(AutoConfig, model) if model else shape_of(run)
    wanted = any(quantity.startswith("tflops") for quantity in (*run.paper, *run.show))
    length = run.length if wanted else None
    found = {METHODS[name].name: of_method(config, name, shape, length) for name in config.training.method}
    if baseline := found.get(BASELINE, {}).get("tflops"):
        for counted in found.values():
            counted["tflops_ratio"] = counted["tflops"] / baseline
    quantities = {quantity for counted in found.values() for quantity in counted}
    return {q: {method: counted[q] for method, counted in found.items()} for q in sorted(quantities)}


def shape_of(run: Run) -> PretrainedConfig:
    values = dict(run.shape)
    try:
        return AutoConfig.for_model(values.pop("model_type", ""), **values)
    except ValueError as error:
        raise UserError(f"run {run.name}: [shape]: {str(error).splitlines()[0]}") from None


def bare_model(shape: PretrainedConfig) -> PreTrainedModel:
    """A model without weights: its tensors know their sizes alone."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(shape)
    return model


def method_on(config: Config, name: str, model: TwoLevelModel, clients: int) -> Method:
    """The method of so many clients, without their data."""
    rank = method_table(config, name).get("rank", config.adapter.rank)
    run = Surroundings(model.common_layout, rank, clients, tuple(range(clients)), config.model.precision)
    return method_in(config, name, run)


def of_method(config: Config, name: str, shape: PretrainedConfig, length: int | None) -> dict[str, float]:
    """What a client trains and sends, and, for inputs of a `length`, what all clients compute in a round."""
    clients = 1 if METHODS[name].pooled else config.data.num_clients or 8
    model = TwoLevelModel(bare_model(shape), adapter_spec(config, name))
    layout, own = model.common_layout, model.personal_layout
    method = method_on(config, name, model, clients)
    state = method.init(torch.zeros(clients, layout.size), torch.zeros(clients, own.size))
    trained = costs.parameters(method, own, state)
    sent = method.sent_numbers(state, 1)
    counted = {"parameters": trained.common + trained.client, "sent_parameters": sum(sent) / len(sent)}
    if length is not None:
        counted["tflops"] = flops_per_round(config, name, model, length) / 1e12
    return counted


def flops_per_round(config: Config, name: str, model: TwoLevelModel, length: int) -> float:
    """Operations of all clients' local steps: those of one client's step, counted while it passes through."""
    number = config.data.num_clients or 8
    learners = 1 if METHODS[name].pooled else number
    method = method_on(config, name, model, 1)
    size = method.batch_size(config.training.batch_size, number)
    x = torch.zeros(1, model.common_layout.size, device="meta")
    y = torch.zeros(1, model.personal_layout.size, device="meta")

    def F(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        """Any scalar of the outputs: the loss itself costs next to nothing."""
        return model(x, y, attention_mask=batch.mask, **batch.tensors).logits.square().mean().view(1)

    batch = Batch(1, {"input_ids": torch.zeros(size, length, dtype=torch.long, device="meta")}, full=True)
    state = method.init(x, y)
    step = costs.flops_of_step(_without_auto(method), F, state, [batch] * method.draws)
    return step * config.training.steps * learners


def _without_auto(method: Method) -> Method:
    """`auto` decides by measured values, of which there are none here: it is counted as what it begins with."""
    mode: Any = getattr(method, "effective_mode", None)
    return method if mode is None else replace(method, hypergradient_mode=mode)  # type: ignore[call-arg]
