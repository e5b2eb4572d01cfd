"""How a text is written after a prompt: which tokens may come next, and prompts that end where writing begins."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class NoRepeatInText(LogitsProcessor):
    """Forbids to repeat `size` tokens of the generated text; what stands in the prompt may be said.

    For all rows at once: transformers' own processor goes through them one by one on the host.
    """

    def __init__(self, size: int, prompt_width: int) -> None:
        self.size, self.prompt_width = size, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = input_ids[:, self.prompt_width :]
        if text.shape[1] < self.size:
            return scores
        said = text.unfold(1, self.size, 1)  # (rows, n-grams, n)
        ending = text[:, text.shape[1] - self.size + 1 :].unsqueeze(1)
        repeats = (said[..., :-1] == ending).all(-1)
        times = torch.zeros_like(scores).scatter_add(1, said[..., -1], repeats.to(scores.dtype))
        return scores.masked_fill(times > 0, -torch.inf)


def left_padded(ids: Tensor, mask: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded rows with the padding moved to the left, so that all end where generation begins."""
    width = ids.shape[1]
    source = torch.arange(width, device=ids.device) - (width - mask.sum(1, keepdim=True))
    moved = ids.gather(1, source.clamp(min=0))
    return torch.where(source >= 0, moved, pad), (source >= 0).long()
