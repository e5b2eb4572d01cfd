"""Tasks: how rows become tokens, what the loss is, what is predicted and how it is scored."""
