"""Tiny random models of every supported architecture, and small classification data for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from language_models import configurations
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from pf2lora.adapters.first_state import factor_entries
from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.core.choice import Judge
from pf2lora.core.layout import NO_LAYOUT, Entry, Layout
from pf2lora.core.method import Loss, Method
from pf2lora.engines.batches import Batch, BatchSource, Encoded, EncodedSource, batch_rows
from pf2lora.methods.ditto import Ditto
from pf2lora.methods.feddpa import FedDPAF, FedDPAT
from pf2lora.methods.fedex_lora import FedExLoRA
from pf2lora.methods.fedprox import FedProx
from pf2lora.methods.fedsa_lora import FedSALoRA
from pf2lora.methods.ffa_lora import FFALoRA
from pf2lora.methods.flexlora import FlexLoRA
from pf2lora.methods.hetlora import HetLoRA
from pf2lora.methods.homlora import HomLoRA
from pf2lora.methods.homlora_bias import HomLoRABias
from pf2lora.methods.homlora_ft import HomLoRAFT
from pf2lora.methods.local import Local
from pf2lora.methods.per_fedavg import PerFedAvg
from pf2lora.methods.pf2lora import PF2LoRA
from pf2lora.methods.pf2lora_joint import PF2LoRAJoint
from pf2lora.methods.rolora import RoLoRA
from pf2lora.methods.scaffold import Scaffold
from pf2lora.methods.server_optimizers import FedAdam, FedAvgM, FedYogi
from pf2lora.tasks.classification.task import Classification

VOCABULARY, WIDTH, LABELS = 50, 16, 3
RANKS: dict[str, Any] = {"rank": 4, "client_rank": 2}
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_labels": LABELS,
    "pad_token_id": 1,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}

DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "position_buckets": 8,
    "max_relative_positions": -1,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pooler_hidden_size": WIDTH,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "electra": {"embedding_size": 8},
    "mpnet": {},
    "distilbert": {"hidden_dim": 32},
    "deberta-v2": DEBERTA,
}
CONFIGS: dict[str, PretrainedConfig] = {
    kind: AutoConfig.for_model(kind, **ENCODER | own) for kind, own in ENCODERS.items()
} | configurations(**ENCODER)


def tiny_model(
    kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """A random classifier; the weights are larger than usual so that gradients are far from zero."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config or CONFIGS[kind]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
    return in_one_precision(model).to(dtype).eval()  # type: ignore[arg-type]


def in_one_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Llama's norms compute in float32 whatever comes in; torch's keep float64, which the tests need. Gemma's weights
    are what is added to 1."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            gemma = type(module).__name__.startswith("Gemma")
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.eps if gemma else module.variance_epsilon)
            norm.weight.data.copy_(module.weight + 1 if gemma else module.weight)
            model.set_submodule(name, norm)
    return model


def tiny_two_level(kind: str, **spec: Any) -> TwoLevelModel:
    return TwoLevelModel(tiny_model(kind), AdapterSpec(**RANKS | spec))


def tiny_data(sizes: Sequence[int], seed: int = 0, longest: int = 12, pad: int = 1) -> Encoded:
    """Random tokens of random length, right-padded, for clients of different sizes."""
    random = np.random.default_rng(seed)
    total = sum(sizes)
    lengths = random.integers(3, longest + 1, total)
    tokens = random.integers(3, VOCABULARY, (total, longest))
    tokens[np.arange(longest)[None, :] >= lengths[:, None]] = pad
    labels = random.integers(0, LABELS, total)
    starts = tuple(int(s) for s in np.concatenate([[0], np.cumsum(sizes)]))
    return Encoded(
        {"input_ids": torch.from_numpy(tokens)},
        {"labels": torch.from_numpy(labels)},
        lengths,
        starts,
        pad_to_multiple_of=1,
    )


class Problem(NamedTuple):
    """Clients with data, a loss, and a start at which every gradient is far from zero."""

    F: Loss
    source: BatchSource
    layout: Layout
    x: Tensor  # (M, P) the same row for every client
    y: Tensor  # (M, Q)
    model: TwoLevelModel | None = None
    personal_layout: Layout = NO_LAYOUT


def tiny_problem(
    kind: str,
    sizes: Sequence[int] = (5, 9, 2),
    *,
    batch: int = 3,
    names: Sequence[str] | None = None,
    moved: bool = True,
    model: PreTrainedModel | None = None,
    **spec: Any,
) -> Problem:
    """Classification with a tiny model; `moved` starts away from B = D = 0."""
    wrapped = TwoLevelModel(model or tiny_model(kind), AdapterSpec(**RANKS | spec))
    names = list(names or [f"client-{k}" for k in range(len(sizes))])
    x, y = wrapped.initial(0, names, torch.float64)
    if moved:
        random = torch.Generator().manual_seed(1)
        x = x + 0.1 * torch.randn(1, x.shape[1], generator=random, dtype=x.dtype)
        y = y + 0.1 * torch.randn(y.shape, generator=random, dtype=y.dtype)
    task = Classification(None, [str(i) for i in range(LABELS)])  # type: ignore[arg-type]
    source = EncodedSource(tiny_data(sizes), names, batch, (0,), keyed=wrapped.spec.dropout > 0)
    layouts = wrapped.common_layout, wrapped.personal_layout
    return Problem(lambda x, y, b: task.loss(wrapped, x, y, b), source, layouts[0], x, y, wrapped, layouts[1])


@dataclass(frozen=True)
class RegressionSource:
    """Rows `(u, target)` of each client; batches as the engine draws them."""

    inputs: list[Tensor]  # per client (rows, n)
    targets: list[Tensor]  # per client (rows, m)
    names: list[str]
    size: int = 4
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        return [len(rows) for rows in self.inputs]

    def draw(self, clients: Sequence[int], numbers: Sequence[int]) -> Batch:
        rows = [
            batch_rows(self.seed, self.names[k], self.sizes[k], i, self.size)
            for k, i in zip(clients, numbers)
        ]
        inputs = torch.cat([self.inputs[k][at] for k, at in zip(clients, rows)])
        targets = torch.cat([self.targets[k][at] for k, at in zip(clients, rows)])
        return Batch(len(clients), {"inputs": inputs, "targets": targets})


def regression_problem(
    sizes: Sequence[int] = (7, 12, 3), *, rank: int = 4, client_rank: int = 2, modules: int = 2, seed: int = 0
) -> Problem:
    """`modules` adapted linear maps `R^6 -> R^5`, applied side by side and summed through tanh; a shared head bias."""
    n, m = 6, 5
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    entries = factor_entries({f"w{i}": (m, n) for i in range(modules)}, "A", "B", rank)
    entries.append(Entry("head", "head", (m,), "bias"))
    common = Layout(tuple(entries), sum(e.size for e in entries))
    own = Layout(
        tuple(factor_entries({f"w{i}": (m, n) for i in range(modules)}, "C", "D", client_rank))
        if client_rank
        else (),
        0,
    )

    def F(x: Tensor, y: Tensor, batch: Batch) -> Tensor:
        p, q = common.unpack(x), own.unpack(y)
        u = batch.tensors["inputs"].unflatten(0, (batch.clients, -1))
        out = p["head.bias"].unsqueeze(1)
        for i in range(modules):
            W = p[f"w{i}.B"] @ p[f"w{i}.A"]
            if client_rank:
                W = W + q[f"w{i}.D"] @ q[f"w{i}.C"]
            out = out + torch.tanh(u @ W.mT)
        return (out - batch.tensors["targets"].view_as(out)).square().mean((1, 2))

    source = RegressionSource(
        [normal(rows, n) for rows in sizes],
        [normal(rows, m) for rows in sizes],
        [f"client-{k}" for k in range(len(sizes))],
    )
    x = 0.5 * normal(1, common.size).expand(len(sizes), -1).clone()
    return Problem(F, source, common, x, 0.5 * normal(len(sizes), own.size), None, own)


SETTINGS: dict[str, tuple[type[Method], dict[str, Any]]] = {
    "pf2lora-exact": (PF2LoRA, {"client_lr": 0.1, "hypergradient_mode": "exact"}),
    "pf2lora-difference": (PF2LoRA, {"client_lr": 0.1, "hypergradient_mode": "difference", "zeta_size": 2}),
    "pf2lora-none-four": (PF2LoRA, {"client_lr": 0.1, "hypergradient_mode": "none", "batches": 4}),
    "pf2lora-joint": (PF2LoRAJoint, {"client_lr": 0.1}),
    "homlora": (HomLoRA, {}),
    "per-fedavg": (PerFedAvg, {"adaptation_lr": 0.1, "hypergradient_mode": "exact"}),
    "hetlora": (HetLoRA, {"ranks": (1, 3, 4), "gamma": 0.7, "penalty": 0.1}),
    "homlora-ft": (HomLoRAFT, {"finetune_steps": 2}),
    "homlora-bias": (HomLoRABias, {}),
    "ditto": (Ditto, {"penalty": 0.5}),
    "feddpa-t": (FedDPAT, {"mixing_weight": 0.3}),
    "feddpa-f": (FedDPAF, {"finetune_steps": 2}),
    "fedprox": (FedProx, {"mu": 0.5}),
    "fedsa-lora": (FedSALoRA, {}),
    "ffa-lora": (FFALoRA, {}),
    "rolora": (RoLoRA, {}),
    "fedavgm": (FedAvgM, {"momentum": 0.5}),
    "fedadam": (FedAdam, {"server_lr": 0.1}),
    "fedyogi": (FedYogi, {"server_lr": 0.1, "tau": 0.01}),
    "scaffold": (Scaffold, {"clients": 3}),
    "fedex-lora": (FedExLoRA, {"trained_rank": 2}),
    "flexlora": (FlexLoRA, {"ranks": (1, 3, 4)}),
    "local": (Local, {}),
}


def build(setting: str, p: Problem, **changes: Any) -> Method:
    """A method of `SETTINGS` for the problem's layout."""
    kind, options = SETTINGS[setting]
    if "personal_layout" in kind.derived:
        options = options | {"personal_layout": p.personal_layout}
    return kind(p.layout, **{"lr": 0.01} | options | changes)


@dataclass(frozen=True)
class EveryRound:
    """Judges of so few rows that they are asked before every round."""

    judge: Callable[[Sequence[int]], Judge]

    def __call__(self, learners: Sequence[int]) -> Judge:
        return self.judge(learners)

    def batches(self, learner: int) -> Fraction:
        return Fraction(1, 1000)
