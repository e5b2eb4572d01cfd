"""Generation: a prompt, and the text that should follow it, with any causal language model.

An example is `prompt, separator, target, end of text`, as in the LoRA paper, and the loss is on the target and the
end of text alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pf2lora.adapters.architectures import ARCHITECTURES
from pf2lora.adapters.base_model import load_model
from pf2lora.adapters.two_level import TwoLevelModel
from pf2lora.engines.batches import Batch, Encoded
from pf2lora.errors import UserError, listed
from pf2lora.tasks.answering import predict_rows
from pf2lora.tasks.base import Example, Scores, Shown, Task
from pf2lora.tasks.generation import scores as nlg
from pf2lora.tasks.generation.decoding import Decoding, cut_at_end, end_tokens, left_padded
from pf2lora.tasks.generation.encoding import Encoder, PromptExamples
from pf2lora.tasks.generation.java import one_meteor
from pf2lora.tasks.generation.prompts import PromptRow
from pf2lora.tasks.generation.settings import CHAT, GenerationSettings, TextRow
from pf2lora.tasks.settings import Metric

SCORES: dict[str, tuple[Callable[[Sequence[str], nlg.References], nlg.Scores], tuple[str, ...]]] = {
    "e2e": (nlg.e2e_scores, nlg.E2E_METRICS),
    "webnlg": (nlg.webnlg_scores, nlg.WEBNLG_METRICS),
    "answers": (nlg.answer_scores, nlg.ANSWER_METRICS),
}
TEXT_METRICS = {
    "BLEU": Metric("BLEU", percent=False),
    "NIST": Metric("NIST", percent=False),
    "METEOR": Metric("METEOR", percent=False),
    "TER": Metric("TER", higher_is_better=False, percent=False),
    "ROUGE_L": Metric("ROUGE-L", percent=False),
    "CIDEr": Metric("CIDEr", percent=False),
    "rouge_l": Metric("ROUGE-L F1", percent=False),
    "rouge_1": Metric("ROUGE-1 F1", percent=False),
    "rouge_2": Metric("ROUGE-2 F1", percent=False),
    "exact_match": Metric("exact match"),
}
LOGIT_COPIES = 6  # of a beam, in float32, while the next token is chosen
LOSSES = {
    "loss": Metric("test loss", higher_is_better=False, percent=False),
    "perplexity": Metric("perplexity", higher_is_better=False, percent=False),
}


def metrics_of(settings: GenerationSettings, scores: str) -> dict[str, Metric]:
    """The scores there are: of texts, where some are written, and of losses."""
    _, names = SCORES[scores]
    return {name: TEXT_METRICS[name] for name in names if settings.max_new_tokens} | LOSSES


class Continuation(NamedTuple):
    """The summed loss of a row's target tokens, how many they are, and the text, where it was asked for."""

    loss: float
    tokens: int
    text: str | None


class Generation(Task[TextRow, Continuation]):
    """The separator between prompt and target is by default the beginning-of-text token (GPT-2's is its end-of-text
    token), as in LoRA. `scores` chooses the metrics of generated text: "e2e", "webnlg" or "answers".
    """

    name: ClassVar[str] = "generation"
    peft_type: ClassVar[str | None] = "CAUSAL_LM"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: GenerationSettings | None = None,
        *,
        scores: str = "e2e",
        chat: bool = False,
        evaluation_batch: int = 16,
        generation_batch: int = 8,
    ) -> None:
        self.tokenizer, self.settings = tokenizer, settings or GenerationSettings()
        self.encoder = Encoder(tokenizer, self.settings, self.note, chat=chat)
        self.pad = self.encoder.pad
        self.labels = [CHAT] if chat else []
        self.scorer, _ = SCORES[scores]
        self.metrics = metrics_of(self.settings, scores)
        self.writes = bool(self.settings.max_new_tokens)
        self.evaluation_batch, self.generation_batch = evaluation_batch, generation_batch

    def load_model(self, name: str, dtype: torch.dtype) -> PreTrainedModel:
        model = load_model(AutoModelForCausalLM, name, dtype)
        longest = getattr(model.config, "max_position_embeddings", None)
        length, new = self.settings.max_length, self.settings.max_new_tokens
        if longest is not None and length + new > longest:
            raise UserError(
                f"max_length {length} and max_new_tokens {new} are {length + new} tokens, but the model takes "
                f"{longest}: lower one of them"
            )
        if self.settings.packing:
            check_packing(model)
        model.config.pad_token_id = self.pad
        return model

    def encode(self, clients: Sequence[Sequence[TextRow]], *, training: bool) -> Encoded:
        return self.encoder.encode(clients, training=training)

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
        ids, counted = batch.tensors["input_ids"], counted_positions(batch)
        following, counts = ids.roll(-1, 1), counted.to(common.dtype)  # position t predicts token t + 1
        packed: dict[str, Any] = {}
        if "example" in batch.tensors:
            packed = {"examples": batch.tensors["example"], "position_ids": batch.tensors["position"]}
        losses = model.token_losses(
            *(common, personal, following, counts, batch.targets),
            attention_mask=batch.mask,
            key=batch.key,
            input_ids=ids,
            **packed,
        )
        return losses, counted

    def predict(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, encoded: Encoded, *, final: bool = False
    ) -> list[list[Continuation]]:
        assert isinstance(encoded, PromptExamples)

        def answer(common: Tensor, personal: Tensor, batch: Batch) -> list[tuple[float, int]]:
            losses, counted = self.token_losses(model, common, personal, batch)
            return list(zip(losses.double().sum(1).tolist(), counted.sum(1).tolist()))

        found = predict_rows(answer, common, personal, encoded, self.evaluation_batch, self.rooms.answering)
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

    def make_room_to_write(self, model: TwoLevelModel, encoded: Encoded, memory: float) -> None:
        """By what each beam of a prompt remembers: a pass is of clients × prompts × beams."""
        if not self.writes:
            return
        assert isinstance(encoded, PromptExamples)
        decoding, room = Decoding.of(self.settings, chat=self.encoder.writes_turns), self.rooms.writing
        longest = int(encoded.prompts.lengths.max(initial=1)) + decoding.max_new_tokens
        prompts = max(1, int(memory // (decoding.beams * beam_bytes(model.model, longest))))
        if prompts < self.generation_batch:
            room.clients, room.rows = 1, prompts
            return
        clients = prompts // self.generation_batch
        room.clients = clients if room.clients is None else min(clients, room.clients)

    def generate(
        self,
        model: TwoLevelModel,
        common: Tensor,
        personal: Tensor,
        prompts: Sequence[Sequence[str | TextRow]],
    ) -> list[list[str]]:
        """What each client's model writes after each of its prompts (a text is a plain one), all clients together."""
        if not self.settings.max_new_tokens:
            raise UserError("max_new_tokens is 0: no text is written")
        asked = [prompt for client in prompts for prompt in client]
        tokens = self.encoder.prompts([PromptRow(p, ()) if isinstance(p, str) else p for p in asked])
        for ids in tokens:
            if len(ids) >= self.settings.max_length:
                raise UserError(
                    f"a prompt has {len(ids)} tokens and fills the window of {self.settings.max_length} (max_length): "
                    f"shorten it"
                )
        return self._continue(
            model, common, personal, self.encoder.prompt_columns(tokens, [len(client) for client in prompts])
        )

    def _continue(
        self, model: TwoLevelModel, common: Tensor, personal: Tensor, prompts: Encoded
    ) -> list[list[str]]:
        decoding = Decoding.of(self.settings, chat=self.encoder.writes_turns)
        ends = end_tokens(self.encoder.stops, model.model)
        config = decoding.config(ends, self.pad)

        def answer(common: Tensor, personal: Tensor, batch: Batch) -> list[str]:
            ids, mask = left_padded(batch.tensors["input_ids"], batch.tensors["attention_mask"], self.pad)
            processors = decoding.processors(ids, mask)
            with model.bound(common, personal) as base:
                found = base.generate(  # type: ignore[operator]
                    input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=processors
                )
            written = [cut_at_end(tokens, ends) for tokens in found[:, ids.shape[1] :].tolist()]
            texts: list[str] = self.tokenizer.batch_decode(written, skip_special_tokens=True)
            return [text.strip() for text in texts]

        prompts = prompts.to(model.model.device)
        # Alike: a short prompt is followed by as many beams, which write as much.
        size, room = self.generation_batch, self.rooms.writing
        return predict_rows(answer, common, personal, prompts, size, room, alike=True)

    # --- scores ------------------------------------------------------------------------------------------

    def score_clients(
        self, predictions: Sequence[Sequence[Continuation]], clients: Sequence[Sequence[TextRow]]
    ) -> list[Scores]:
        with one_meteor():
            return super().score_clients(predictions, clients)

    def score(self, predictions: Sequence[Continuation], rows: Sequence[TextRow]) -> Scores:
        """Loss and perplexity; with generated text, the text metrics too (None: noted why)."""
        tokens = sum(p.tokens for p in predictions)
        loss = sum(p.loss for p in predictions) / tokens if tokens else None
        losses: Scores = {"loss": loss, "perplexity": None if loss is None else math.exp(min(loss, 700.0))}
        texts = [self.encoder.compared(p.text) for p in predictions if p.text is not None]
        if not texts:
            return losses
        found = self.scorer(texts, [self._references(row) for row in rows])
        for name, reason in found.absent.items():
            self.note(f"no {TEXT_METRICS[name].label}: {reason}")
        return {name: found.values.get(name) for name in self.metrics if name not in losses} | losses

    def _references(self, row: TextRow) -> list[str]:
        return [self.encoder.compared(target) or target for target in row.targets]

    def resampled(
        self, predictions: Sequence[Continuation], rows: Sequence[TextRow], draws: np.ndarray
    ) -> np.ndarray | None:
        """ROUGE-L of answers is a mean over them; the other scores are of all texts together."""
        if next(iter(self.metrics)) != "rouge_l" or any(p.text is None for p in predictions):
            return None
        both = [
            (self.encoder.compared(p.text or ""), self._references(row)) for p, row in zip(predictions, rows)
        ]
        found = [nlg.answer_scores([text], [references]).values["rouge_l"] for text, references in both]
        return np.array(found)[draws].mean(1)

    def describe(self, rows: Sequence[TextRow]) -> dict[str, int]:
        counts = Counter(row.group for row in rows if row.group)
        return {group: counts[group] for group in sorted(counts)}

    def show(self, row: TextRow) -> Shown:
        encoded = self.encode([[row]], training=True)  # a row alone is not packed with others
        target = encoded.token_columns["target"][0].bool().tolist()
        return self.shown(encoded, 0, target, f"loss on {sum(target)} of {int(encoded.lengths[0])} tokens")

    def input_text(self, row: TextRow) -> str:
        return row.prompt

    def answer(self, prediction: Continuation, row: TextRow) -> dict[str, str | None]:
        return {"predicted": prediction.text}

    def example(self, prediction: Continuation, row: TextRow) -> Example | None:
        return None if prediction.text is None else Example(row.prompt, row.targets, prediction.text)


def counted_positions(batch: Batch) -> Tensor:
    """Where the next token is the model's to write (M·b, T): position t predicts token t + 1."""
    target = batch.tensors["target"].bool()
    following = torch.zeros_like(target)
    following[:, :-1] = target[:, 1:]
    return following


def beam_bytes(model: PreTrainedModel, tokens: int) -> int:
    """About what a model takes to write one text of so many tokens, the prompt's among them: a key and a value of every
    layer for each, twice while they grow, and some copies of the next token's logits."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    remembered = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return 2 * tokens * remembered + LOGIT_COPIES * 4 * config.vocab_size


def check_packing(model: PreTrainedModel) -> None:
    """Packed rows need a model whose attention is told who sees whom."""
    kind = model.config.model_type
    if kind not in ARCHITECTURES or ARCHITECTURES[kind].attention != "causal":
        causal = [name for name, known in ARCHITECTURES.items() if known.attention == "causal"]
        raise UserError(f"--packing does not know models of the kind {kind!r} (known: {listed(causal)})")
