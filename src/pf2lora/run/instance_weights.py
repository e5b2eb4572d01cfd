"""FedDPA's weight for each input: the more it is like the client's own rows, the more its own adapter counts.

`α(u) = α · (1/S) Σ_s cos(h(u), h(u_s))`, with h the frozen base model's representation, u_s some of the client's own
rows, and α the `mixing_weight` that both adapters were trained with: what is as the client's own gets just that. One
adapter cannot hold a weight per input, so this is for answering by the package, and no PEFT folder has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pf2lora.core.randomness import generator
from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.methods.feddpa import Mixture
from pf2lora.run.set_up import method_in, surroundings

if TYPE_CHECKING:
    from pf2lora.run.saved import LoadedRun

SAMPLE = 5  # S, as in the paper
TOGETHER = 16  # inputs in one pass, each with adapters of its own
LONGEST = 512  # tokens that an input is represented by


def answers(run: LoadedRun, client: str | None, rows: Sequence[Any], own_rows: Sequence[Any]) -> list[Any]:
    """A client's answers, each by the mixture that its input asks for. A client that deploys the common adapter alone
    has nothing to weigh."""
    method = mixture(run)
    if client is None:
        raise UserError("a weight per input is for a client's own adapter: name the client (--client)")
    if run.joined_later(client):
        raise UserError(
            f"{client} joined later: its own adapter stands on the whole common one, and nothing is mixed"
        )
    common, personal = run.client(client)
    shares = own_shares(run, rows, sampled(own_rows, run.saved.seed, client)) * method.mixing_weight
    found = list[Any]()
    for part in split(range(len(rows)), TOGETHER):
        if personal.any():
            x, y = method.reweighed(common, personal, shares[part.start : part.stop])
        else:
            x, y = (t.expand(len(part), -1) for t in (common, personal))
        encoded = run.task.encode([[rows[i]] for i in part], training=False).to(run.device)
        found += [answer for (answer,) in run.task.predict(run.model, x, y, encoded, final=True)]
    return found


def mixture(run: LoadedRun) -> Mixture:
    """The run's method, which must be one that mixes two adapters."""
    kind = METHODS[run.saved.method]
    if not issubclass(kind, Mixture):
        able = " or ".join(name for name in METHODS.own if issubclass(METHODS[name], Mixture))
        raise UserError(f"{run.saved.method} mixes no adapters: a weight per input is for runs of {able}")
    name, model = run.saved.method, run.model
    alone = surroundings(
        run.config,
        name,
        model.common_layout,
        clients=1,
        positions=(0,),
        personal_layout=model.personal_layout,
    )
    method = method_in(run.config, name, alone)
    assert isinstance(method, Mixture)
    return method


def sampled(rows: Sequence[Any], seed: int, client: str) -> list[Any]:
    """S of the client's rows, by the run's seed."""
    if not rows:
        raise UserError("a weight per input needs some of the client's own rows; the file has none")
    order = torch.randperm(len(rows), generator=generator(seed, "instance weights", client))
    return [rows[int(i)] for i in order[:SAMPLE]]


def own_shares(run: LoadedRun, rows: Sequence[Any], own: Sequence[Any]) -> Tensor:
    """(n,) how alike each row is to the own ones, from 0 to 1."""
    theirs, ours = representations(run, rows), representations(run, own)
    return (theirs @ ours.mT).mean(1).clamp(0, 1)


@torch.no_grad()
def representations(run: LoadedRun, rows: Sequence[Any]) -> Tensor:
    """(n, d) unit vectors: the last layer of the frozen base model, without any adapter, at the last token where the
    model reads from left to right, else the mean over the tokens."""
    base, tokenizer = run.model.model.base_model, run.task.tokenizer
    causal = "CausalLM" in type(run.model.model).__name__
    found = []
    for part in split(range(len(rows)), TOGETHER):
        texts = [run.task.input_text(rows[i]) for i in part]
        longest = min(LONGEST, tokenizer.model_max_length, run.model.model.config.max_position_embeddings - 2)
        tokens = tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=longest,
            padding_side="right",
            return_tensors="pt",
        )
        inputs = {name: t.to(run.device) for name, t in tokens.items()}
        hidden, mask = base(**inputs).last_hidden_state.float(), inputs["attention_mask"]
        if causal:
            last = mask.sum(1).sub(1).clamp_min(0)
            found.append(hidden[torch.arange(len(hidden), device=hidden.device), last])
        else:
            found.append((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))
    return normalize(torch.cat(found), dim=1)


def split(numbers: range, size: int) -> Iterator[range]:
    """The numbers, `size` at a time."""
    yield from (numbers[i : i + size] for i in range(0, len(numbers), size))
