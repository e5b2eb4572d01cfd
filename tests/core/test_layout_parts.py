"""Some entries of a flat vector: taken out, and put back, by name and not by place."""

from __future__ import annotations

import pytest
import torch

from pf2lora.core.layout import NO_LAYOUT, Entry, Layout

A1, B1 = Entry("one", "A", (1, 2)), Entry("one", "B", (3, 1))
A2, B2 = Entry("two", "A", (1, 1)), Entry("two", "B", (2, 1))
HEAD = Entry("classifier", "head", (2,), "bias")
LAYOUT = Layout((A1, B1, A2, B2, HEAD), shared=8)
X = torch.arange(20.0).view(2, 10)


@pytest.mark.parametrize(
    ("part", "places"),
    [
        (NO_LAYOUT, []),
        (LAYOUT.shared_part, [0, 1, 2, 3, 4, 5, 6, 7]),
        (LAYOUT.shared_kinds("A"), [0, 1, 5]),
        (LAYOUT.shared_kinds("B", "head"), [2, 3, 4, 6, 7]),
        (Layout.of([B1, A2]), [2, 3, 4, 5]),
    ],
    ids=["nothing", "the shared ones", "every A", "every B and no head", "neighbours"],
)
def test_a_part_is_taken_out_and_put_back(part: Layout, places: list[int]) -> None:
    assert LAYOUT.select(X, part).tolist() == X[:, places].tolist()
    others = [i for i in range(10) if i not in places]
    for numbers in (-torch.ones(len(places)), -torch.rand(2, len(places))):  # one for all, one for each
        changed = LAYOUT.replaced(X, part, numbers)
        assert torch.equal(changed[:, places], numbers.expand(2, -1))
        assert torch.equal(changed[:, others], X[:, others])


def test_neighbours_are_a_view() -> None:
    assert LAYOUT.select(X, LAYOUT.shared_part).data_ptr() == X.data_ptr()
    assert LAYOUT.spans(Layout.of([A1, B1, B2])) == [(0, 5), (6, 8)]


def test_what_belongs_to_an_entry_has_its_shape_kind_and_name() -> None:
    beside = [A1.beside("control"), HEAD.beside("control")]
    assert [e.name for e in beside] == ["one.A.control", "classifier.bias.control"]
    assert [(e.kind, e.shape) for e in beside] == [("A", (1, 2)), ("head", (2,))]
