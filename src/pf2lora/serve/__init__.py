"""A run over HTTP: OpenAI's API on one base model, with every client's adapter as a model name."""
