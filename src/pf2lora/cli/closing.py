"""The last lines of a run: which method to deploy, where each client's adapter is, and the commands to use it."""

from __future__ import annotations

import shlex
from pathlib import Path

from pf2lora.errors import one_line
from pf2lora.report.advice import advice, recommended
from pf2lora.report.summary import useless
from pf2lora.run.result import Result


def closing(result: Result, out: Path) -> list[str]:
    """The lines; none where every method failed."""
    leading = recommended(result)
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
    doubt = useless(result, method)
    return [
        *([f"What to deploy: {advice(result, method, as_good)}"] if several else []),
        *([one_line(doubt)] if doubt else []),
        f"Each client's adapter, {chosen}: {adapters}/NAME (a PEFT folder)",
        "Use it:",
        f"  {command('predict', *options, '--file', 'rows.jsonl')}",
        f"  {command('evaluate', *options, 'rows.jsonl')}",
        f"  {command('export', *options, '--merge', '--out', f'{client}-model')}",
    ]


def command(*words: str) -> str:
    return one_line("pf2lora " + shlex.join(words))
