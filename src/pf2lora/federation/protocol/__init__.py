"""The two halves of a federated run and what passes between them. Knows nothing of FLARE."""
