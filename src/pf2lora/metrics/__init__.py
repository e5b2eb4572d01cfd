"""Scores as their official scripts give them: pure functions, one file per family."""
