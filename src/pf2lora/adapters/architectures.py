"""What to adapt in each architecture, and the one place where an architecture needs help with the client axis."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pf2lora.adapters.layers import Adapted


@dataclass(frozen=True)
class Architecture:
    """`targets` are the last parts of module names. `fused` names the parts of a projection that holds several
    side by side, in their order, and which of them are adapted. `attention` says who may look at whom."""

    targets: tuple[str, ...]
    fused: tuple[str, ...] = ()
    adapted_parts: tuple[str, ...] = ()
    extra_head: tuple[str, ...] = ()  # newly initialised beside the classifier, so trained with it
    attention: Literal["own", "bidirectional", "causal"] = "own"


BERT_LIKE = Architecture(("query", "value"), attention="bidirectional")
LLAMA_LIKE = Architecture(("q_proj", "v_proj"), attention="causal")

ARCHITECTURES: dict[str, Architecture] = {
    "bert": BERT_LIKE,
    "roberta": BERT_LIKE,
    "xlm-roberta": BERT_LIKE,
    "electra": BERT_LIKE,
    "mpnet": Architecture(("attn.q", "attn.v"), attention="bidirectional"),
    "distilbert": Architecture(("q_lin", "v_lin"), extra_head=("pre_classifier",), attention="bidirectional"),
    "deberta-v2": Architecture(("query_proj", "value_proj"), extra_head=("pooler",)),
    "gpt2": Architecture(
        ("attn.c_attn",), fused=("q", "k", "v"), adapted_parts=("q", "v"), attention="causal"
    ),
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "smollm3": LLAMA_LIKE,
    "gemma": LLAMA_LIKE,
    "gemma2": LLAMA_LIKE,
    "gemma3_text": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "phi": LLAMA_LIKE,
    "phi3": Architecture(
        ("self_attn.qkv_proj",), fused=("q", "k", "v"), adapted_parts=("q", "v"), attention="causal"
    ),
}

HEADS = ("classifier", "score", "qa_outputs")
"""The names transformers gives to task heads; PEFT saves the same ones."""


def needed_mask(
    architecture: Architecture,
    mask: Tensor | None,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    length: int = 0,
    fused: bool = True,
) -> Tensor | None:
    """What attention needs of a mask (examples, tokens) over rows that are padded on the right.

    Made here because transformers looks into a mask to leave it out where it can, and that waits for the device. A
    causal model needs none: no token sees what comes after it, and what padding itself computes is not used. Where
    attention is written out and not `fused`, transformers would make a mask of its own out of none: it gets one of
    `length` tokens that is ready-made.
    """
    if architecture.attention == "own":
        return mask
    if architecture.attention == "causal":
        least = torch.finfo(dtype).min
        return (
            None if fused else torch.full((1, 1, length, length), least, dtype=dtype, device=device).triu(1)
        )
    if mask is None:
        return None if fused else torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        mask == 0, torch.finfo(dtype).min
    )
    return bias[:, None, None, :].expand(-1, 1, mask.shape[1], -1)


def packed_mask(examples: Tensor, dtype: torch.dtype) -> Tensor:
    """Who sees whom in rows (rows, tokens) that hold several examples, by the number of each token's example: a token
    those before it of its own example. (rows, 1, tokens, tokens), to be added to the scores; made without asking the
    device anything, so that it can be recorded."""
    apart = examples.unsqueeze(2) != examples.unsqueeze(1)
    apart |= torch.ones_like(apart[0]).triu(1)
    return torch.zeros(apart.shape, dtype=dtype, device=apart.device).masked_fill(
        apart, torch.finfo(dtype).min
    )[:, None]


def within_windows(mask: Tensor, config: Any) -> Tensor | dict[str, Tensor]:
    """A ready-made causal mask (…, tokens, tokens) for a model some of whose layers, or all, look `sliding_window`
    tokens back at most. transformers hands such a mask to every layer as it is, unless there is one for each kind."""
    window, length = getattr(config, "sliding_window", None), mask.shape[-1]
    if window is None or length <= window:
        return mask
    far = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril(-window)
    near = mask.masked_fill(far, torch.finfo(mask.dtype).min)
    if getattr(config, "layer_types", None) is None:  # every layer has the window
        return near
    return {"full_attention": mask, "sliding_attention": near}


def keep_positions(model: PreTrainedModel) -> None:
    """Relative positions that are right with the client axis, and looked up: for the kinds that have any."""
    if model.config.model_type == "deberta-v2":
        stack_relative_positions(model)
    if model.config.model_type == "mpnet":
        keep_position_buckets(model)


def keep_position_buckets(model: nn.Module) -> None:
    """Let MPNet look its relative positions up: they depend on the length of a batch alone.

    Some versions of transformers make them on the host in every pass, which no CUDA graph can hold. What is added to
    the scores of every example alike is not repeated for each of them.
    """
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    for module in model.modules():
        if isinstance(module, MPNetEncoder):
            module.position_buckets = {}  # type: ignore[assignment]
            module.compute_position_bias = MethodType(position_bias, module)  # type: ignore[method-assign]


def position_bias(
    self: Any, hidden_states: Tensor, position_ids: None = None, num_buckets: int = 32
) -> Tensor:
    """MPNet's bias `(1, heads, tokens, tokens)` of the attention scores by distance."""
    key = hidden_states.shape[1], hidden_states.device
    if key not in self.position_buckets:
        at = torch.arange(hidden_states.shape[1])
        bucket = self.relative_position_bucket(at[None, :] - at[:, None], num_buckets=num_buckets)
        self.position_buckets[key] = bucket.to(hidden_states.device)
    bias: Tensor = self.relative_attention_bias(self.position_buckets[key])
    return bias.permute(2, 0, 1).unsqueeze(0)


def stack_relative_positions(model: nn.Module) -> None:
    """Make DeBERTa's disentangled attention right when several clients share a pass.

    It sends the relative-position embeddings through the query and key projections once, as a batch of one,
    and repeats the result over the batch. With adapted projections the result differs between clients.
    """
    from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention

    for module in model.modules():
        if isinstance(module, DisentangledSelfAttention):
            module.disentangled_attention_bias = MethodType(disentangled_attention_bias, module)  # type: ignore[method-assign]
        elif isinstance(module, DebertaV2Encoder):
            module.positions_by_length = {}  # type: ignore[assignment]
            module.get_rel_pos = MethodType(relative_positions, module)  # type: ignore[method-assign]


def relative_positions(
    self: Any, hidden_states: Tensor, query_states: None = None, relative_pos: None = None
) -> Tensor | None:
    """DeBERTa's distances between tokens, looked up by the batch's length: they are made with numbers from the host."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    if not self.relative_attention:
        return None
    key = hidden_states.shape[1], hidden_states.device
    if key not in self.positions_by_length:
        buckets = {"bucket_size": self.position_buckets, "max_position": self.max_relative_positions}
        self.positions_by_length[key] = build_relative_position(hidden_states, hidden_states, **buckets)
    found: Tensor = self.positions_by_length[key]
    return found


def disentangled_attention_bias(
    self: Any,
    query_layer: Tensor,
    key_layer: Tensor,
    relative_pos: Tensor | None,
    rel_embeddings: Tensor,
    scale_factor: int,
) -> Tensor:
    """The content-to-position and position-to-content scores (eq. 4 of the DeBERTa paper), per client.

    `query_layer` and `key_layer` are (examples · heads, tokens, d), client-major.
    """
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position, scaled_size_sqrt

    if relative_pos is None:
        relative_pos = build_relative_position(
            query_layer,
            key_layer,
            bucket_size=self.position_buckets,
            max_position=self.max_relative_positions,
        )
    span = self.pos_ebd_size
    offset = relative_pos.reshape(relative_pos.shape[-2:]).to(query_layer.device, torch.long)
    embeddings = rel_embeddings[: 2 * span].unsqueeze(0)
    heads = self.num_attention_heads

    def scores(content: Tensor, projection: nn.Module, index: Tensor) -> Tensor:
        shared = embeddings.to(content.dtype)
        position = projection.per_client(shared) if isinstance(projection, Adapted) else projection(shared)
        position = (
            position.unflatten(-1, (heads, -1)).transpose(1, 2).unsqueeze(1)
        )  # (M or 1, 1, heads, 2·span, d)
        grouped = content.view(position.shape[0], -1, heads, *content.shape[1:])
        raw = (grouped @ position.mT).flatten(0, 2)
        picked = raw.gather(-1, index.clamp(0, 2 * span - 1).expand(raw.shape[0], -1, -1))
        scale = scaled_size_sqrt(content, scale_factor)  # rounded as the model itself rounds it
        return picked / scale.to(content.dtype)

    bias = torch.zeros((), dtype=query_layer.dtype, device=query_layer.device)
    if "c2p" in self.pos_att_type:
        projection = self.key_proj if self.share_att_key else self.pos_key_proj
        bias = bias + scores(query_layer, projection, offset + span)
    if "p2c" in self.pos_att_type:
        projection = self.query_proj if self.share_att_key else self.pos_query_proj
        bias = (
            bias + scores(key_layer, projection, -offset + span).mT
        )  # the same distances from the key's side
    return bias
