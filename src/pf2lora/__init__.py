"""pf2lora: personalized federated LoRA fine-tuning of language models."""

__version__ = "0.1.0"
