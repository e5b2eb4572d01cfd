"""The two-level adapter in a transformers model: its layers, what each architecture needs, PEFT in and out."""
