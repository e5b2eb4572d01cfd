"""Names for several methods, and names that others use."""

from __future__ import annotations

import pytest

from pf2lora.errors import UserError
from pf2lora.methods import METHODS, SET_NAMES, SETS
from pf2lora.run.config import from_settings


def test_a_set_stands_for_its_methods() -> None:
    def methods(*names: str) -> tuple[str, ...]:
        return from_settings({"method": list(names)}).training.method

    assert methods("paper") == SETS["paper"] and methods("all") == tuple(METHODS)
    assert methods("ditto", "aggregation", "homlora") == ("ditto", *SETS["aggregation"])  # each once
    with pytest.raises(UserError, match="the method 'paper' is named twice"):
        methods("paper", "paper")
    for members in SETS.values():
        assert set(members) <= set(METHODS) and len(members) == len(set(members))
    assert set(METHODS.own) == {name for members in SETS.values() for name in members}
    assert not set(SET_NAMES) & set(METHODS)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("fedavg", "unknown method 'fedavg'; here that is homlora$"),
        ("FedRep", "unknown method 'FedRep'; here that is homlora with --head personal$"),
        ("dito", r"unknown method 'dito'; did you mean 'ditto'\?"),
    ],
)
def test_names_that_others_use_are_understood(asked: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_settings({"method": [asked]})


def test_the_papers_methods_have_a_colour_each_in_figures() -> None:
    from pf2lora.reproduce.charts import colour

    assert len({colour(name) for name in SETS["paper"]}) == len(SETS["paper"])
