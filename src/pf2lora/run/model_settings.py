"""The base model and how it is computed with: `[model]` of a config."""

from __future__ import annotations

from dataclasses import dataclass

from pf2lora.errors import unknown
from pf2lora.settings import setting

WORDS = {
    "precision": ("auto", "float32", "bfloat16"),
    "checkpointing": ("auto", "on", "off"),
    "quantization": ("none", "nf4", "int8"),
}


@dataclass(frozen=True)
class ModelSettings:
    """The base model and where it runs. What is faster without being worse is the default."""

    name: str = setting("", "base model: a Hugging Face hub name or a folder", everyday=True)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", everyday=True)
    precision: str = setting(
        "auto",
        "precision of the base model: float32, bfloat16, or auto: bfloat16 where CUDA has it",
        everyday=True,
    )
    compile: bool | None = setting(
        None, "compile the model: faster steps after a while (default: on CUDA, where a run is long enough)"
    )
    graphs: bool = setting(True, "on CUDA, record a local step once and replay it")
    checkpointing: str = setting(
        "auto",
        "layers keep their input alone and are run again for the gradient: on, off, or auto: where memory would not do",
    )

    quantization: str = setting("none", "the frozen base model's layers in fewer bits: nf4, int8 or none")

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            if getattr(self, name) not in words:
                raise unknown(name, getattr(self, name), words)
        if self.precision == "auto":  # from here on it is known: a run says what it was, and goes on with it
            object.__setattr__(self, "precision", fastest_precision(self.device))


def fastest_precision(device: str) -> str:
    """bfloat16 on an accelerator that computes with it, float32 elsewhere."""
    if device == "cpu":
        return "float32"
    import torch

    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
