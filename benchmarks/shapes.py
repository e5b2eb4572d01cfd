"""What the benchmarks run on: models of well-known shapes with random weights, random clients, and their arithmetic."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from pf2lora.adapters.layers import Projection, sizes
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.core.method import State, moved
from pf2lora.data.client import Client
from pf2lora.engines.batches import Batch, Encoded, EncodedSource
from pf2lora.engines.processes import current
from pf2lora.run import config as configs
from pf2lora.run import workload as workloads
from pf2lora.run.set_up import WINDOW, Trial, set_up
from pf2lora.run.workload import DTYPES
from pf2lora.tasks.classification.task import Classification
from pf2lora.tasks.generation.task import Generation

LABELS = ["0", "1"]
SEED = 0
CAUSAL = GPT2Config, LlamaConfig
CLIENT_LR = 0.03  # fixed: what is timed is the paper's step


@dataclass(frozen=True)
class Shape:
    """A model, `batch` rows a step and client, of `length` tokens each, or of varied lengths up to that.

    GPT-2 and Llama are trained on the causal language-model loss, the encoders on classifying sequences. The weights
    are drawn in `dtype`: a large model has no room for anything but its own precision.
    """

    config: PretrainedConfig
    batch: int = 16
    length: int = 128
    varied: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def causal(self) -> bool:
        return isinstance(self.config, CAUSAL)


def encoder(
    width: int, layers: int, heads: int, vocabulary: int, kind: type = RobertaConfig, deviation: float = 0.02
) -> PretrainedConfig:
    config: PretrainedConfig = kind(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=514,
        num_labels=len(LABELS),
        initializer_range=deviation,
    )
    return config


def decoder(
    width: int, layers: int, heads: int, vocabulary: int, deviation: float = 0.02
) -> PretrainedConfig:
    return GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        initializer_range=deviation,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama(
    width: int, layers: int, heads: int, key_heads: int, inner: int, vocabulary: int, *, tied: bool
) -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


SHAPES: dict[str, Shape] = {
    "roberta-base": Shape(encoder(768, 12, 12, 50265)),
    "roberta-large": Shape(encoder(1024, 24, 16, 50265)),
    "gpt2-medium": Shape(decoder(1024, 24, 16, 50257), batch=4),
    "gpt2-xl": Shape(decoder(1600, 48, 25, 50257), batch=4),
    "llama-1.2b": Shape(llama(2048, 16, 32, 8, 8192, 128256, tied=True), 4, 512, dtype=torch.bfloat16),
    "llama-8b": Shape(llama(4096, 32, 32, 8, 14336, 128256, tied=False), 2, 1024, dtype=torch.bfloat16),
    "minilm": Shape(encoder(384, 6, 12, 30522, BertConfig), varied=True),
    # Wider weights, as a narrow model needs them for its outputs to depend on its adapters at all.
    "small-roberta": Shape(encoder(32, 2, 2, 100, deviation=0.3), batch=2, length=8),
    "small-gpt2": Shape(decoder(32, 2, 2, 100, deviation=0.3), batch=2, length=8),
    "small-llama": Shape(llama(32, 2, 4, 2, 64, 100, tied=False), batch=2, length=8),
}


def random_lengths(shape: Shape, count: int, random: np.random.Generator) -> np.ndarray:
    """All of the full length, or as short texts have them: log-normal with median 30 tokens."""
    if not shape.varied:
        return np.full(count, shape.length)
    return np.clip(random.lognormal(np.log(30), 0.5, count).astype(np.int64), 4, shape.length)


def random_rows(shape: Shape, clients: int, rows: int) -> Encoded:
    """`rows` rows of random tokens for each client."""
    random = np.random.default_rng(0)
    total = clients * rows
    lengths = random_lengths(shape, total, random)
    tokens = random.integers(3, shape.config.vocab_size, (total, shape.length))
    tokens[np.arange(shape.length) >= lengths[:, None]] = 1
    columns = {"input_ids": tokens} | (
        {"target": (np.arange(shape.length) < lengths[:, None]).astype(np.int32)} if shape.causal else {}
    )
    labels = {} if shape.causal else {"labels": random.integers(0, 2, total)}
    return Encoded(
        {name: torch.from_numpy(column) for name, column in columns.items()},
        {name: torch.from_numpy(column) for name, column in labels.items()},
        lengths,
        tuple(range(0, total + 1, rows)),
    )


def random_model(shape: Shape, device: torch.device) -> PreTrainedModel:
    """The model in the shape's precision, its weights drawn where it lives: a large one is slow to draw on a host."""
    torch.manual_seed(0)
    kind = AutoModelForCausalLM if shape.causal else AutoModelForSequenceClassification
    with device:
        model: PreTrainedModel = kind.from_config(
            copy.deepcopy(shape.config), attn_implementation="sdpa", dtype=shape.dtype
        )
    return model.eval()


class Workload:
    """A frozen model on a device and the clients that train on it."""

    def __init__(self, shape: Shape, clients: int, device: torch.device, *, rows: int) -> None:
        self.shape, self.device = shape, device
        self.precision = next(name for name, dtype in DTYPES.items() if dtype == shape.dtype)
        self.base = random_model(shape, device)
        words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
        self.task = Generation(tokenizer) if shape.causal else Classification(tokenizer, LABELS)
        self.names = [f"client-{k}" for k in range(clients)]
        self.data = random_rows(shape, clients, rows).to(device)

    def to(self, precision: str) -> None:
        """The base model in another precision; there is no way back from 16 bits."""
        self.base.to(DTYPES[precision])  # type: ignore[arg-type]
        self.precision = precision

    def set_up(self, method: str, clients: int, **settings: Any) -> Trial:
        """The package's set-up of a method on the first clients; the rows of all stay where they are. The trial's
        `model.remove()` gives the base model back."""
        own = {
            "method": [method],
            "batch_size": self.shape.batch,
            "client_lr": CLIENT_LR,
            "group_by_length": self.shape.varied,
            "precision": self.precision,
        }
        rows = replace(self.data, starts=self.data.starts[: clients + 1])
        workload = workloads.Workload(
            config=configs.from_settings(own | settings, "benchmark"),
            task=self.task,
            clients=[Client(name, [], []) for name in self.names[:clients]],
            base=self.base,
            train=rows,
            test=rows,
            validation=None,
            validation_sample=None,
            device=self.device,
            processes=current(),
        )
        return set_up(workload, method, SEED)

    def plain_source(self, *, by_length: bool) -> EncodedSource:
        """Batches as a user's collator pads them: to their own longest row."""
        data = replace(self.data, pad_to_multiple_of=1)
        return EncodedSource(data, self.names, self.shape.batch, (SEED,), window=WINDOW if by_length else 1)


def start(trial: Trial) -> State:
    """The first state on the device, moved off B = D = 0, where half of all gradients vanish."""
    random = torch.Generator().manual_seed(SEED)
    x = trial.state.x + 0.02 * torch.randn(trial.state.x.shape[1], generator=random)
    y = trial.state.y + 0.02 * torch.randn(trial.state.y.shape, generator=random)
    return moved(trial.method.init(x, y), trial.workload.device)


def batches_of(source: EncodedSource, clients: Sequence[int], step: int, draws: int) -> list[Batch]:
    """What `clients` draw for a step."""
    return [source.draw(clients, [step * draws + d] * len(clients)) for d in range(draws)]


GRADIENTS = {None: (1, 1), "none": (2, 2), "difference": (3, 3), "exact": (3, 4)}
"""How many gradients' worth of (frozen products, attention and adapters) a step needs, by hypergradient; HOMLoRA: None.

The second-order term of `exact` differentiates a gradient once more. A frozen product `u W` is linear in the one thing
that varies: two more products, as many as another gradient. A product of two things that vary (attention's, the
adapters') has a derivative by each: twice as many as another gradient.
"""


def necessary_flops(model: TwoLevelModel, batches: list[Batch], hypergradient: str | None) -> float:
    """The arithmetic that one step of all clients cannot do without, padding left out.

    One gradient of a row of t tokens: 2·W·t operations forward and as many backward (by the activations only: W is
    frozen) for the W weights of the linear layers that see every token, an output layer among them, less the first
    layer's q, k and v backward, below which nothing is trained; attention's two products of 2·t·t·d (half of that if
    causal) in each layer, three times over (forward, and backward by either side); the adapters' 2·P·t for their P
    weights, three times over as well. A classifier or pooler sees one token of a row and is left out, under 0.1%.
    """
    config = model.model.config
    frozen = sum(
        math.prod(sizes(module))
        for name, module in model.model.named_modules()
        if isinstance(module, Projection) and "classifier" not in name and "pooler" not in name
    )
    adapters = model.common_layout.adapter_size + model.personal_layout.size
    seen = 0.5 if isinstance(config, CAUSAL) else 1.0
    lengths = torch.cat([batch.tensors["attention_mask"].sum(1) for batch in batches]).double()
    tokens = float(lengths.sum()) / len(batches)
    pairs = float(lengths.square().sum()) / len(batches) * seen
    attention = config.num_hidden_layers * 4 * pairs * config.hidden_size
    linear, bilinear = GRADIENTS[hypergradient]
    heads = config.num_attention_heads  # and as many keys and values, or fewer
    outputs = 1 + 2 * getattr(config, "num_key_value_heads", heads) / heads
    products = 2 * frozen + 2 * (frozen - outputs * config.hidden_size**2)
    return linear * products * tokens + bilinear * 3 * (attention + 2 * adapters * tokens)
