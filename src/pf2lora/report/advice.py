"""Which method to take, of those that a result compares."""

from __future__ import annotations

from pf2lora.errors import UserError
from pf2lora.methods import METHODS
from pf2lora.run import numbers
from pf2lora.run.result import Result
from pf2lora.run.verdicts import best


def recommended(result: Result) -> list[str]:
    """The method to take, and behind it those that nothing tells from it; empty where every method failed. What needs
    everybody's data in one place is a bound, and nobody's to take while there is another."""
    leading = best(result)
    return [name for name in leading if not pools(name)] or leading


def advice(result: Result, method: str, as_good: list[str]) -> str:
    """The method to take, and what nothing tells from it, with the cheapest of those."""
    label = result.methods[method].label
    if not as_good:
        return f"{label}."
    others = numbers.listed([result.methods[name].label for name in as_good])
    scores = [result.estimate(name, result.point, result.metric) for name in (method, *as_good)]
    highest = "" if len({score.mean for score in scores if score}) == 1 else ", the highest score"
    line = f"{label}{highest}; as far as these test rows tell, {others} would do as well"
    cheapest = min(as_good, key=lambda name: sent(result, name))
    if sent(result, cheapest) < sent(result, method):
        size = sent(result, cheapest)
        what = (
            f"{numbers.size(size)} a round instead of {numbers.size(sent(result, method))}"
            if size
            else "nothing"
        )
        who = result.methods[cheapest].label if len(as_good) > 1 else "it"
        line += f", and {who} sends {what}"
    return line + "."


def sent(result: Result, method: str) -> float:
    """Bytes that a client sends in a round."""
    return result.methods[method].runs[0].bytes_per_round.total


def pools(method: str) -> bool:
    """Whether the method is a bound that needs everybody's data in one place."""
    try:
        return METHODS[method].pooled
    except UserError:  # another package's, which results call by a name of its own
        return False
