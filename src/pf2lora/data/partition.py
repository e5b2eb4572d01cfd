"""Sharing rows out among clients. Pure functions of the rows' keys: labels, topics, values of a column.

Each returns one array of row indices per client: together they hold every row once. Train and test are shared
out alike by two calls with the same rule and seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pf2lora.core.streams import numpy_generator
from pf2lora.data.client import Client
from pf2lora.data.files import natural_order
from pf2lora.errors import UserError

T = TypeVar("T")
Indices = NDArray[np.int64]
Parts = list[Indices]


def by_heterogeneity(
    labels: Sequence[str],
    clients: int,
    h: float,
    seed: int,
    sizes: Sequence[float] | None = None,
    order: Sequence[str] | None = None,
) -> Parts:
    """The paper's rule: of each label a fraction 1−h goes to an i.i.d. pool, the rest is laid out in label
    order, and client j takes the j-th slice of both. h = 0 is i.i.d., h = 1 fully sorted.

    Slices are equal, or in proportion to `sizes`. The label order is the natural one unless `order` is given.
    """
    if not 0 <= h <= 1:
        raise UserError(f"the heterogeneity is {h:g}; it must lie between 0 (i.i.d.) and 1 (sorted by label)")
    _check_enough(len(labels), clients)
    rng = numpy_generator(seed, "heterogeneity")
    pool, in_order = [], []
    for group in _indices_by_key(labels, order or natural_order(labels)):
        rng.shuffle(group)
        shared = round((1 - h) * len(group))
        pool.append(group[:shared])
        in_order.append(group[shared:])
    pools = _slices(rng.permutation(np.concatenate(pool)), clients, sizes)
    slices = _slices(np.concatenate(in_order), clients, sizes)
    return _without_empty([np.concatenate(both) for both in zip(pools, slices)])


def by_dirichlet(labels: Sequence[str], clients: int, alpha: float, seed: int) -> Parts:
    """Each label is shared out in proportions drawn from Dirichlet(α): small α is skewed, large α is i.i.d.

    The proportions depend on the seed and the label alone, so train and test get the same.
    """
    if not alpha > 0:
        raise UserError(
            f"Dirichlet's alpha is {alpha:g}; it must be above 0 (0.1 is very skewed, 100 is even)"
        )
    _check_enough(len(labels), clients)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    names = natural_order(labels)
    for name, group in zip(names, _indices_by_key(labels, names)):
        shares = numpy_generator(seed, "dirichlet", name).dirichlet([alpha] * clients)
        numpy_generator(seed, "rows", name).shuffle(group)
        for part, piece in zip(parts, _slices(group, clients, list(shares))):
            part.append(piece)
    return _without_empty([np.concatenate(part) for part in parts])


def by_column(values: Sequence[str], clients: int | None = None) -> Parts:
    """One client per value, in natural order, or the values joined into `clients` groups of similar size."""
    return by_groups(values, column_groups(values, clients))


def column_groups(values: Sequence[str], clients: int | None = None) -> dict[str, list[str]]:
    """Which client gets which values of a column; made once from the training rows, used for the test too."""
    names = natural_order(values)
    if clients is None:
        return {name: [name] for name in names}
    _check_enough(len(names), clients, "different values")
    counts = Counter(values)
    groups: list[list[str]] = [[] for _ in range(clients)]
    filled = [0] * clients
    for name in sorted(names, key=lambda name: -counts[name]):  # largest first: the groups come out even
        smallest = filled.index(min(filled))
        groups[smallest].append(name)
        filled[smallest] += counts[name]
    return dict(zip(client_names(clients), map(natural_order, groups)))


def by_groups(values: Sequence[str], groups: Mapping[str, Sequence[str]]) -> Parts:
    """Fixed groups of values, one per client: each value must be in one group, each group must have rows."""
    owner: dict[str, str] = {}
    for name, members in groups.items():
        for value in members:
            if value in owner:
                raise UserError(f"{value!r} is in two groups, {owner[value]!r} and {name!r}")
            owner[value] = name
    parts: dict[str, list[int]] = {name: [] for name in groups}
    for index, value in enumerate(values):
        if value not in owner:
            listed = ", ".join(list(owner)[:12]) + (" …" if len(owner) > 12 else "")
            raise UserError(f"rows with the value {value!r} belong to no client (clients have: {listed})")
        parts[owner[value]].append(index)
    for name, part in parts.items():
        if not part:
            raise UserError(
                f"client {name!r} would get no rows: none has the value {' or '.join(groups[name])!r}"
            )
    return [np.array(part, dtype=np.int64) for part in parts.values()]


def client_names(clients: int) -> list[str]:
    """Names for clients that have none of their own."""
    return [f"client-{number}" for number in range(1, clients + 1)]


def uneven_sizes(clients: int, ratio: float, seed: int) -> list[float]:
    """Relative sizes from 1 to `ratio` in even steps of proportion, in random order; 1 makes all equal."""
    if not ratio >= 1:
        raise UserError(
            f"the size ratio is {ratio:g}; the largest client has at least 1 times the smallest's rows"
        )
    return [
        float(size) for size in numpy_generator(seed, "sizes").permutation(np.geomspace(1, ratio, clients))
    ]


def make_clients(
    train: Sequence[T],
    test: Sequence[T],
    train_parts: Sequence[Indices],
    test_parts: Sequence[Indices],
    names: Sequence[str] | None = None,
) -> list[Client[T]]:
    """Clients from rows and the parts that each gets of them."""
    names = names or client_names(len(train_parts))
    if not len(names) == len(train_parts) == len(test_parts):
        raise ValueError(f"{len(names)} names, {len(train_parts)} train parts, {len(test_parts)} test parts")
    return [
        Client(name, [train[i] for i in ours], [test[i] for i in held_out])
        for name, ours, held_out in zip(names, train_parts, test_parts)
    ]


def _check_enough(there: int, clients: int, what: str = "rows") -> None:
    if clients < 1:
        raise UserError(f"the number of clients is {clients}; it must be 1 or more")
    if there < clients:
        raise UserError(f"{clients} clients for {there} {what}: each needs at least one")


def _indices_by_key(keys: Sequence[str], names: Sequence[str]) -> Parts:
    groups: dict[str, list[int]] = {name: [] for name in names}
    for index, key in enumerate(keys):
        groups[key].append(index)
    return [np.array(group, dtype=np.int64) for group in groups.values()]


def _slices(rows: Indices, clients: int, sizes: Sequence[float] | None) -> Parts:
    """Consecutive slices, equal up to one row or in proportion to `sizes`."""
    if sizes is None:
        sizes = [1.0] * clients
    if len(sizes) != clients or not all(size >= 0 for size in sizes):
        raise UserError(f"{clients} clients need {clients} sizes of 0 or more, not {list(sizes)}")
    ends = np.rint(np.cumsum(sizes) / np.sum(sizes) * len(rows)).astype(int)
    return np.split(rows, ends[:-1])


def _without_empty(parts: Parts) -> Parts:
    """A client that rounding or a small share left with nothing takes one row of the largest."""
    parts = list(parts)
    for index, part in enumerate(parts):
        if not len(part):
            largest = max(range(len(parts)), key=lambda i: len(parts[i]))
            parts[index], parts[largest] = parts[largest][-1:], parts[largest][:-1]
    return parts
