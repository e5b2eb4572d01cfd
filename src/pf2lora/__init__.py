"""pf2lora: personalized federated LoRA fine-tuning of language models."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "federate"]


def __getattr__(name: str) -> Any:
    """`pf2lora.federate` is imported when it is used: the command line's help needs no torch."""
    if name == "federate":
        from pf2lora.run.api import federate

        return federate
    raise AttributeError(f"module 'pf2lora' has no attribute {name!r}")
