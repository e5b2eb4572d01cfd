"""Every partition is one (each row once), is skewed as it says, and comes out the same again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pf2lora.core.streams import numpy_generator
from pf2lora.data.partition import (
    Parts,
    by_column,
    by_dirichlet,
    by_groups,
    by_heterogeneity,
    column_groups,
    make_clients,
    uneven_sizes,
)
from pf2lora.data.split import draw_stratified, subsample
from pf2lora.errors import UserError


def labels_of(counts: dict[str, int], seed: int = 0) -> list[str]:
    labels = [label for label, count in counts.items() for _ in range(count)]
    return [str(label) for label in np.random.default_rng(seed).permutation(labels)]


def shares(labels: Sequence[str], parts: Parts) -> np.ndarray:
    names = sorted(set(labels))
    return np.array([[np.mean([labels[i] == n for i in part]) for n in names] for part in parts])


LABELS = labels_of({"a": 500, "b": 300, "c": 200})
RULES: dict[str, Callable[[Sequence[str], int], Parts]] = {
    "i.i.d.": lambda labels, seed: by_heterogeneity(labels, 7, 0, seed),
    "heterogeneity": lambda labels, seed: by_heterogeneity(labels, 7, 0.6, seed),
    "sorted": lambda labels, seed: by_heterogeneity(labels, 7, 1, seed),
    "uneven": lambda labels, seed: by_heterogeneity(labels, 3, 0.6, seed, sizes=[1, 2, 4]),
    "dirichlet": lambda labels, seed: by_dirichlet(labels, 7, 0.3, seed),
    "column": lambda labels, seed: by_column(labels),
    "joined": lambda labels, seed: by_column(labels, 2),
    "groups": lambda labels, seed: by_groups(labels, {"x": ["c", "a"], "y": ["b"]}),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_row_goes_to_one_client(rule: str) -> None:
    parts = RULES[rule](LABELS, 0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(LABELS)))
    assert all(len(part) for part in parts)


@pytest.mark.parametrize("rule", ["i.i.d.", "heterogeneity", "sorted", "dirichlet"])
def test_the_seed_decides(rule: str) -> None:
    first, again, other = (RULES[rule](LABELS, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other))


def test_without_heterogeneity_clients_are_alike() -> None:
    parts = by_heterogeneity(LABELS, 5, 0, 0)
    assert [len(part) for part in parts] == [200] * 5
    assert np.abs(shares(LABELS, parts) - [0.5, 0.3, 0.2]).max() < 0.12


def test_full_heterogeneity_is_sorted_by_label() -> None:
    parts = by_heterogeneity(LABELS, 10, 1, 0)
    assert [sorted({LABELS[i] for i in part}) for part in parts] == [["a"]] * 5 + [["b"]] * 3 + [["c"]] * 2
    straddling = by_heterogeneity(LABELS, 4, 1, 0)  # slices of 250 meet the label borders at 500 and 800
    assert ["".join(sorted({LABELS[i] for i in part})) for part in straddling] == ["a", "a", "b", "bc"]


@pytest.mark.parametrize("h", [0.3, 0.9])
def test_a_fraction_h_is_sorted_and_the_rest_is_shared(h: float) -> None:
    labels = labels_of({"neg": 4000, "pos": 4000})
    share = shares(labels, by_heterogeneity(labels, 8, h, 0))[:, 0]
    expected = np.array([h + (1 - h) / 2] * 4 + [(1 - h) / 2] * 4)
    assert np.abs(share - expected).max() < 0.05


def test_label_order_is_natural_or_given() -> None:
    labels = labels_of({"2": 10, "10": 10})
    assert [labels[part[0]] for part in by_heterogeneity(labels, 2, 1, 0)] == ["2", "10"]
    given = by_heterogeneity(labels, 2, 1, 0, order=["10", "2"])
    assert [labels[part[0]] for part in given] == ["10", "2"]


def test_train_and_test_are_shared_out_alike() -> None:
    test = labels_of({"a": 250, "b": 150, "c": 100}, seed=1)
    for rule in ("sorted", "heterogeneity", "dirichlet"):
        gap = shares(LABELS, RULES[rule](LABELS, 0)) - shares(test, RULES[rule](test, 0))
        assert np.abs(gap).max() < 0.15, rule


def test_dirichlet_proportions_depend_on_the_label_alone() -> None:
    only_b = [label for label in LABELS if label == "b"]
    of_b = [sum(LABELS[i] == "b" for i in part) for part in by_dirichlet(LABELS, 7, 5, 0)]
    assert of_b == [len(part) for part in by_dirichlet(only_b, 7, 5, 0)]


def test_dirichlet_alpha_goes_from_skewed_to_even() -> None:
    def spread(alpha: float) -> float:
        return float(np.std([len(part) for part in by_dirichlet(LABELS, 5, alpha, 0)]))

    assert spread(0.05) > 5 * spread(1000)
    assert spread(1000) < 10
    assert min(len(part) for part in by_dirichlet(LABELS, 50, 0.01, 0)) == 1


def test_sizes() -> None:
    parts = by_heterogeneity(LABELS, 3, 0.5, 0, sizes=[1, 2, 7])
    assert [len(part) for part in parts] == [100, 200, 700]
    assert sorted(uneven_sizes(3, 4, 0)) == pytest.approx([1, 2, 4])
    assert uneven_sizes(3, 1, 0) == [1, 1, 1]


@pytest.mark.parametrize("h", [0, 0.3, 0.5, 0.7, 1])
@pytest.mark.parametrize("rows", [8, 9, 10, 11, 13])
def test_few_rows_still_reach_every_client(rows: int, h: float) -> None:
    parts = by_heterogeneity(["a", "b"] * (rows // 2) + ["a"] * (rows % 2), 8, h, 0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(rows))
    assert min(map(len, parts)) == 1


def test_columns_join_into_balanced_groups() -> None:
    values = labels_of({"t1": 60, "t2": 50, "t3": 30, "t4": 30, "t10": 30})
    assert list(column_groups(values)) == ["t1", "t2", "t3", "t4", "t10"]
    assert column_groups(values, 2) == {"client-1": ["t1", "t4"], "client-2": ["t2", "t3", "t10"]}
    assert [len(part) for part in by_column(values, 2)] == [90, 110]


def test_bad_partitions() -> None:
    for call, message in [
        (lambda: by_heterogeneity(LABELS, 2, 1.2, 0), "heterogeneity is 1.2; it must lie between 0"),
        (lambda: by_heterogeneity(LABELS, 2, float("nan"), 0), "heterogeneity is nan"),
        (lambda: by_heterogeneity(["a"] * 3, 4, 0.5, 0), "4 clients for 3 rows"),
        (lambda: by_heterogeneity(LABELS, 0, 0.5, 0), "number of clients is 0"),
        (lambda: by_heterogeneity(LABELS, 2, 0.5, 0, sizes=[1]), "2 clients need 2 sizes"),
        (lambda: by_dirichlet(LABELS, 2, 0, 0), "alpha is 0; it must be above 0"),
        (lambda: by_dirichlet(["a"] * 3, 4, 1, 0), "4 clients for 3 rows"),
        (lambda: by_column(LABELS, 4), "4 clients for 3 different values"),
        (lambda: by_groups(LABELS, {"x": ["a", "b"]}), "value 'c' belong to no client"),
        (lambda: by_groups(LABELS, {"x": ["a", "b", "c"], "y": ["a"]}), "'a' is in two groups, 'x' and 'y'"),
        (lambda: by_groups(["a"], {"x": ["a"], "y": ["d"]}), "client 'y' would get no rows"),
        (lambda: uneven_sizes(2, 0.5, 0), "size ratio is 0.5"),
    ]:
        with pytest.raises(UserError, match=message):
            call()


def test_make_clients() -> None:
    clients = make_clients("abcd", "xy", [np.array([2, 0]), np.array([1, 3])], [np.array([1]), np.array([0])])
    assert [(c.name, c.train, c.test) for c in clients] == [
        ("client-1", ["c", "a"], ["y"]),
        ("client-2", ["b", "d"], ["x"]),
    ]


def test_stratified_draws_are_in_proportion() -> None:
    keys = ["a"] * 60 + ["b"] * 30 + ["c"] * 10
    drawn = draw_stratified(keys, 20, numpy_generator(0))
    assert Counter(key for key, out in zip(keys, drawn) if out) == {"a": 12, "b": 6, "c": 2}
    # Ten labels of one row each, and one of ten: only the latter can give rows away.
    keys = [*"abcdefghij", *"k" * 10]
    assert not draw_stratified(keys, 9, numpy_generator(0))[:10].any()
    assert draw_stratified(keys, 12, numpy_generator(0)).sum() == 12


def test_subsample_keeps_labels_and_order() -> None:
    rows = list(range(100))
    kept = subsample(rows, ["rare" if row == 50 else "common" for row in rows], 5, numpy_generator(0))
    assert len(kept) == 5 and 50 in kept and kept == sorted(kept)
    assert subsample(rows, rows, 1000, numpy_generator(0)) == rows
    with pytest.raises(UserError, match="limit is 0"):
        subsample(rows, rows, 0, numpy_generator(0))
