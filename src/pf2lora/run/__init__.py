"""A run: its config, its set-up, its trials, what is written of it."""
