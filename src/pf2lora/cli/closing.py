"""The last lines of a run: which method to deploy, where each client's adapter is, and the commands to use it."""

from __future__ import annotations

import shlex
from pathlib import Path

from pf2lora.errors import UserError, one_line
from pf2lora.methods import METHODS
from pf2lora.run import numbers
from pf2lora.run.result import Result
from pf2lora.run.verdicts import best


def closing(result: Result, out: Path) -> list[str]:
    """The lines; none where every method failed."""
    leading = [name for name in best(result) if not pools(name)] or best(result)
    if not leading:
        return []
    method, *as_good = leading
    several = len(result.methods) > 1
    adapters = (out / "methods" / method if several else out) / "clients"
    run = result.methods[method].runs[0]
    chosen = (
        "what it chose on its validation rows" if run.choices else "what it is served after the last round"
    )
    options = [str(out), *(["--method", method] if several else []), "--client", result.clients[0].name]
    client = result.clients[0].name
    return [
        *([f"What to deploy: {advice(result, method, as_good)}"] if several else []),
        f"Each client's adapter, {chosen}: {adapters}/NAME (a PEFT folder)",
        "Use it:",
        f"  {command('predict', *options, '--file', 'rows.jsonl')}",
        f"  {command('evaluate', *options, 'rows.jsonl')}",
        f"  {command('export', *options, '--merge', '--out', f'{client}-model')}",
    ]


def advice(result: Result, method: str, as_good: list[str]) -> str:
    """The method to take, and what nothing tells from it, with the cheapest of those."""
    label = result.methods[method].label
    if not as_good:
        return f"{label}."
    others = numbers.listed([result.methods[name].label for name in as_good])
    line = f"{label}, the highest score; as far as these test rows tell, {others} would do as well"
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


def command(*words: str) -> str:
    return one_line("pf2lora " + shlex.join(words))
