"""How a text is written after a prompt: searched for by beams, taken token by token, or drawn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from pf2lora.core.streams import stream_seed
from pf2lora.tasks.generation.sampling import Sampler, choose
from pf2lora.tasks.generation.settings import GenerationSettings

BEAMS, NO_REPEAT = 10, 4  # the LoRA paper's


@dataclass(frozen=True)
class Decoding:
    """The settings of decoding, with what was left open filled in. A `temperature` above 0 draws tokens."""

    beams: int
    no_repeat_ngram: int
    length_penalty: float
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int

    @classmethod
    def of(cls, settings: GenerationSettings, *, chat: bool) -> Self:
        """Plain prompts are continued as in the LoRA paper; an answer in a conversation is taken token by token."""
        searched = not chat and not settings.temperature
        beams = (BEAMS if searched else 1) if settings.beams is None else settings.beams
        no_repeat = (
            (NO_REPEAT if searched else 0) if settings.no_repeat_ngram is None else settings.no_repeat_ngram
        )
        return cls(
            beams,
            no_repeat,
            settings.length_penalty,
            settings.max_new_tokens,
            settings.temperature,
            settings.top_p,
            settings.sampling_seed,
        )

    def config(self, stops: list[int], pad: int) -> GenerationConfig:
        """For `generate`; tokens that are drawn are chosen by a processor, which leaves one of them."""
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            num_beams=self.beams,
            length_penalty=self.length_penalty,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=stops,
            pad_token_id=pad,
        )

    def processors(self, ids: Tensor, mask: Tensor) -> LogitsProcessorList:
        """For prompts that are padded on the left."""
        found = LogitsProcessorList()
        if self.no_repeat_ngram:
            found.append(NoRepeatInText(self.no_repeat_ngram, ids.shape[1]))
        if self.temperature:
            prompts = [
                row[-length:] if length else [] for row, length in zip(ids.tolist(), mask.sum(1).tolist())
            ]
            # By the prompt's own tokens: what is drawn does not depend on who shares the pass.
            seeds = [stream_seed(self.seed, "sampling", *prompt) for prompt in prompts]
            found.append(Drawn([Sampler(self.temperature, self.top_p, seed) for seed in seeds]))
        return found


class Drawn(LogitsProcessor):
    """Leaves one token to each row, drawn by its own sampler. Where a model's outputs are no numbers, any token."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = samplers

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        broken = ~torch.isfinite(scores.max(-1, keepdim=True).values)
        tokens = choose(scores.masked_fill(broken, 0.0), self.samplers)
        chosen = torch.tensor(tokens, device=scores.device).unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


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


def end_tokens(stops: Sequence[int], model: PreTrainedModel) -> list[int]:
    """The tokens that end a text: those that end targets in training (`Encoder.stops`), and the model's own."""
    own = getattr(model.generation_config, "eos_token_id", None)
    several = own if isinstance(own, list) else [own]
    return list(dict.fromkeys(token for token in (*stops, *several) if token is not None))


def cut_at_end(tokens: Sequence[int], stops: Collection[int]) -> list[int]:
    """What was written before the first of the tokens that end a text; not all of them are special to a tokenizer,
    which would decode the others."""
    return list(tokens[: next((i for i, token in enumerate(tokens) if token in stops), len(tokens))])
