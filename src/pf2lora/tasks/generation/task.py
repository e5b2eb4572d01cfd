"""Generation: a prompt, and the text that should follow it, with any causal language model.

An example is `prompt, separator, target, end of text`, as in the LoRA paper, and the loss is on the target and the
end of text alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.errors import UserError
from pf2lora.tasks.base import Example, Examples, Scores, Task, pad_columns, predict_rows
from pf2lora.tasks.generation import scores as nlg
from pf2lora.tasks.generation.java import one_meteor
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import GenerationSettings
from pf2lora.tasks.settings import Metric

SCORES: dict[str, tuple[Callable[[Sequence[str], nlg.References], nlg.Scores], tuple[str, ...]]] = {
    "e2e": (nlg.e2e_scores, nlg.E2E_METRICS),
    "webnlg": (nlg.webnlg_scores, nlg.WEBNLG_METRICS),
}
TEXT_METRICS = {
    "BLEU": Metric("BLEU", percent=False),
    "NIST": Metric("NIST", percent=False),
    "METEOR": Metric("METEOR", percent=False),
    "TER": Metric("TER", higher_is_better=False, percent=False),
    "ROUGE_L": Metric("ROUGE-L", percent=False),
    "CIDEr": Metric("CIDEr", percent=False),
}
LOSSES = {
    "loss": Metric("test loss", higher_is_better=False, percent=False),
    "perplexity": Metric("perplexity", higher_is_better=False, percent=False),
}


class Continuation(NamedTuple):
    """The summed loss of a row's target tokens, how many they are, and the text, where it was asked for."""

    loss: float
    tokens: int
    text: str | None


@dataclass(frozen=True)
class PromptExamples(Examples):
    """Each example is a prompt with one of its targets; `prompts` are the rows' prompts alone, to be continued."""

    prompts: Encoded = field(kw_only=True)

    def of(self, clients: Sequence[int]) -> Self:
        return replace(super().of(clients), prompts=self.prompts.of(clients))


class Generation(Task[PromptRow, Continuation]):
    """The separator between prompt and target is by default the beginning-of-text token (GPT-2's is its end-of-text
    token), as in LoRA. `scores` chooses the metrics of generated text: "e2e" or "webnlg".
    """

    name: ClassVar[str] = "generation"
    peft_type: ClassVar[str | None] = "CAUSAL_LM"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings | None = None,
        *,
        scores: str = "e2e",
        evaluation_batch: int = 16,
        generation_batch: int = 8,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token, so a generated text would never end")
        self.tokenizer, self.settings = tokenizer, settings or GenerationSettings()
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.scorer, names = SCORES[scores]
        written = names if self.settings.max_new_tokens else ()
        self.metrics = {name: TEXT_METRICS[name] for name in written} | LOSSES
        self.writes = bool(written)
        self.evaluation_batch, self.generation_batch = evaluation_batch, generation_batch
        self.separator = self._separator(self.settings.separator)

    def _separator(self, text: str | None) -> list[int]:
        if text is not None:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        first = self.tokenizer.bos_token_id
        return [self.tokenizer.eos_token_id if first is None else first]

    def load_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        model = load_model(AutoModelForCausalLM, name, dtype)
        longest = getattr(model.config, "max_position_embeddings", None)
        length, new = self.settings.max_length, self.settings.max_new_tokens
        if longest is not None and length + new > longest:
            raise UserError(
                f"max_length {length} and max_new_tokens {new} are {length + new} tokens, but the model takes "
                f"{longest}: lower one of them"
            )
        model.config.pad_token_id = self.pad
        return model

    # --- rows to tokens ----------------------------------------------------------------------------------

    def encode(self, clients: Sequence[Sequence[PromptRow]], *, training: bool) -> PromptExamples:
        rows = [row for client in clients for row in client]
        prompts = self._prompt_tokens([row.prompt for row in rows])
        owners = [k for k, client in enumerate(clients) for _ in client]
        numbers = [i for client in clients for i in range(len(client))]
        examples, lengths, row_numbers, sizes = [], [], [], [0] * len(clients)
        cut = 0
        targets = iter(self._target_tokens([target for row in rows for target in row.targets]))
        for row, prompt, owner, number in zip(rows, prompts, owners, numbers):
            for target in [next(targets) for _ in row.targets]:
                room = self.settings.max_length - len(prompt)
                if room < 2:  # not even one token of the target and the end of text
                    continue
                cut += len(target) > room
                examples.append(prompt + (target if len(target) <= room else target[:room]))
                lengths.append(len(prompt))
                row_numbers.append(number)
                sizes[owner] += 1
        self._report(prompts, cut, sizes, training)
        tokens = {"input_ids": examples}
        columns = pad_columns(tokens, self.pad, {"prompt_length": torch.tensor(lengths)}, sizes)
        predicted = columns.lengths - np.maximum(lengths, 1)  # nothing predicts a row's first token
        return PromptExamples(
            **vars(columns) | {"targets": predicted},
            row_numbers=np.array(row_numbers),
            row_counts=tuple(map(len, clients)),
            prompts=self._prompt_columns(prompts, [len(client) for client in clients]),
        )

    def _prompt_tokens(self, prompts: Sequence[str]) -> list[list[int]]:
        """Prompts with the separator; the model's own beginning-of-text token comes first where it uses one."""
        found: list[list[int]] = self.tokenizer(list(prompts))["input_ids"] if prompts else []
        eos = self.tokenizer.eos_token_id
        return [(ids[:-1] if ids and ids[-1] == eos else ids) + self.separator for ids in found]

    def _target_tokens(self, targets: Sequence[str]) -> list[list[int]]:
        """A target follows a space, as words do in running text, and ends with the end of text."""
        for target in targets:
            if not target.strip():
                raise UserError("an empty target: there is nothing to learn from it")
        texts = [target if target[0].isspace() else f" {target}" for target in targets]
        found = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [[*ids, self.tokenizer.eos_token_id] for ids in found]

    def _prompt_columns(self, prompts: list[list[int]], sizes: list[int]) -> Encoded:
        """Prompts that fill the window are cut at the left: what they ask for usually stands at the end."""
        room = self.settings.max_length - 1
        return pad_columns({"input_ids": [ids[-room:] for ids in prompts]}, self.pad, {}, sizes)

    def _report(self, prompts: list[list[int]], cut: int, sizes: list[int], training: bool) -> None:
        part = "training" if training else "test"
        full = sum(len(ids) > self.settings.max_length - 2 for ids in prompts)
        if full:
            consequence = (
                "they are left out of training"
                if training
                else "they have no loss, and their text follows the prompt's last part"
            )
            self.note(
                f"{full} of {len(prompts)} {part} prompts fill the window of {self.settings.max_length} tokens "
                f"(max_length): {consequence}"
            )
        if cut:
            self.note(
                f"{cut} {part} targets are cut to fit the window of {self.settings.max_length} tokens (max_length)"
            )
        for k, size in enumerate(sizes):
            if training and not size:
                raise UserError(
                    f"all prompts of client number {k + 1} fill the window of {self.settings.max_length} tokens: "
                    f"a larger max_length is needed"
                )

    # --- loss and generation -----------------------------------------------------------------------------

    def example_losses(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Weighed by the target's tokens: long targets weigh more, as in LoRA."""
        losses, counted = self.token_losses(model, common, personal, batch)
        return losses.sum(1), counted.sum(1)

    def token_losses(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The loss of every token given those before it, zero outside the targets, and where the targets are."""
        ids, mask = batch.tensors["input_ids"], batch.tensors["attention_mask"]
        position = torch.arange(1, ids.shape[1] + 1, device=ids.device)  # of the token that is predicted here
        counted = mask.roll(-1, 1).bool() & (position >= batch.tensors["prompt_length"].unsqueeze(1))
        counted &= position < ids.shape[1]
        following, counts, most = ids.roll(-1, 1), counted.to(common.dtype), batch.targets
        losses = model.token_losses(
            *(common, personal, following, counts, most),
            attention_mask=batch.mask,
            key=batch.key,
            input_ids=ids,
        )
        return losses, counted

    def predict(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, *, final: bool = False
    ) -> list[list[Continuation]]:
        assert isinstance(encoded, PromptExamples)

        def answer(common: Tensor, personal: Tensor, batch: Batch) -> list[tuple[float, int]]:
            losses, counted = self.token_losses(model, common, personal, batch)
            return list(zip(losses.double().sum(1).tolist(), counted.sum(1).tolist()))

        found = predict_rows(answer, common, personal, encoded, self.evaluation_batch, self.clients_per_pass)
        losses = encoded.by_row(found)
        texts: Sequence[Sequence[str | None]] = [[None] * len(rows) for rows in losses]
        if final and self.settings.max_new_tokens:
            texts = self._continue(model, common, personal, encoded.prompts)
        return [
            [
                Continuation(sum(s for s, _ in row), sum(n for _, n in row), text)
                for row, text in zip(rows, written)
            ]
            for rows, written in zip(losses, texts)
        ]

    def generate(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, prompts: Sequence[Sequence[str]]
    ) -> list[list[str]]:
        """What each client's model writes after each of its prompts, all clients together."""
        if not self.settings.max_new_tokens:
            raise UserError("max_new_tokens is 0: no text is written")
        tokens = self._prompt_tokens([prompt for client in prompts for prompt in client])
        for ids in tokens:
            if len(ids) >= self.settings.max_length:
                raise UserError(
                    f"a prompt has {len(ids)} tokens and fills the window of {self.settings.max_length} (max_length): "
                    f"shorten it"
                )
        return self._continue(
            model, common, personal, self._prompt_columns(tokens, [len(client) for client in prompts])
        )

    def _continue(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, prompts: Encoded
    ) -> list[list[str]]:
        config = GenerationConfig(
            max_new_tokens=self.settings.max_new_tokens,
            num_beams=self.settings.beams,
            length_penalty=self.settings.length_penalty,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.pad,
        )

        def answer(common: Tensor, personal: Tensor, batch: Batch) -> list[str]:
            ids, mask = left_padded(batch.tensors["input_ids"], batch.tensors["attention_mask"], self.pad)
            processors = LogitsProcessorList()
            if self.settings.no_repeat_ngram:
                processors.append(NoRepeatInText(self.settings.no_repeat_ngram, ids.shape[1]))
            with model.bound(common, personal) as base:
                found = base.generate(  # type: ignore[operator]
                    input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors
                )
            texts: list[str] = self.tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
            return [text.strip() for text in texts]

        prompts = prompts.to(model.model.device)
        return predict_rows(answer, common, personal, prompts, self.generation_batch, self.clients_per_pass)

    # --- scores ------------------------------------------------------------------------------------------

    def score_clients(
        self, predictions: Sequence[Sequence[Continuation]], clients: Sequence[Sequence[PromptRow]]
    ) -> list[Scores]:
        with one_meteor():
            return super().score_clients(predictions, clients)

    def score(self, predictions: Sequence[Continuation], rows: Sequence[PromptRow]) -> Scores:
        """Loss and perplexity; with generated text, the text metrics too (None: noted why)."""
        tokens = sum(p.tokens for p in predictions)
        loss = sum(p.loss for p in predictions) / tokens if tokens else None
        losses: Scores = {"loss": loss, "perplexity": None if loss is None else math.exp(min(loss, 700.0))}
        texts = [p.text for p in predictions if p.text is not None]
        if not texts:
            return losses
        found = self.scorer(texts, [row.targets for row in rows])
        for name, reason in found.absent.items():
            self.note(f"no {TEXT_METRICS[name].label}: {reason}")
        return {name: found.values.get(name) for name in self.metrics if name not in losses} | losses

    def describe(self, rows: Sequence[PromptRow]) -> dict[str, int]:
        counts = Counter(row.group for row in rows if row.group)
        return {group: counts[group] for group in sorted(counts)}

    def input_text(self, row: PromptRow) -> str:
        return row.prompt

    def answer(self, prediction: Continuation, row: PromptRow) -> dict[str, str | None]:
        return {"predicted": prediction.text}

    def example(self, prediction: Continuation, row: PromptRow) -> Example | None:
        return None if prediction.text is None else Example(row.prompt, row.targets, prediction.text)


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
