"""Whether a run's passes are compiled where nobody says: only if it is long enough to get the time back."""

from __future__ import annotations

import math

from torch import nn
from transformers import PreTrainedModel

from pf2lora.adapters.architectures import ARCHITECTURES
from pf2lora.adapters.quantised import QuantisedLinear
from pf2lora.core.randomness import participants
from pf2lora.methods import METHODS
from pf2lora.run.workload import Workload

# The operations of training in which compiling for one length of batches has paid for itself, as measured on an H200
# (`benchmarks/compile_cost.py`, docs/performance.md) and rounded up; a slower device gets it back in fewer. An encoder
# is compiled whole, for 9% of a step; of a language model one layer is, for 25%.
REPAID_PER_LENGTH = {"encoder": 1e17, "causal": 1e16}
LENGTHS = 32  # a batch's length is rounded up to a multiple of it


def compiles(workload: Workload, method: str, seeds: int) -> bool:
    """What the config says, or whether compiling repays itself. It is counted and not timed, so that a run that goes on
    decides as it did when it began."""
    model = workload.config.model
    if model.compile is not None:
        return model.compile
    if workload.device.type != "cuda":
        return False
    return training_operations(workload, method, seeds) > repaid_from(workload)


def repaid_from(workload: Workload) -> float:
    """The operations of training from which on compiling repays itself."""
    known = ARCHITECTURES.get(workload.base.config.model_type)
    kind = "causal" if known is not None and known.attention == "causal" else "encoder"
    return REPAID_PER_LENGTH[kind] * lengths(workload)


def why(workload: Workload, method: str, seeds: int) -> str:
    """A line where passes are compiled and nobody said so."""
    if workload.config.model.compile is not None or not compiles(workload, method, seeds):
        return ""
    operations, count = training_operations(workload, method, seeds), lengths(workload)
    return (
        f"passes are compiled (--compile): about {operations:.1e} operations of training, and batches of "
        f"{count} length{'s' if count > 1 else ''} repay it from {repaid_from(workload):.1e} on"
    )


def lengths(workload: Workload) -> int:
    """How many lengths the batches of the training rows may have."""
    rounded = {math.ceil(length / LENGTHS) for length in workload.train.lengths.tolist()}
    return max(1, len(rounded))


def training_operations(workload: Workload, method: str, seeds: int) -> float:
    """About the operations of all local steps: the base model's products forward, and back to what its layers got."""
    training, kind = workload.config.training, METHODS[method]
    taking_part = len(participants(training.seed, 1, len(workload.clients), training.participation))
    rows = seeds * taking_part * training.rounds * training.steps * training.batch_size
    tokens = rows * float(workload.train.lengths.mean())
    return 4 * multiplied(workload.base) * tokens * kind.gradients_per_step


def multiplied(model: PreTrainedModel) -> int:
    """The model's weights that every token is multiplied with: all but tables that it is looked up in."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rounded = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))
    return rounded + sum(p.numel() for p in model.parameters() if id(p) not in looked_up)
