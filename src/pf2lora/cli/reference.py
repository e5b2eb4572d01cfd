"""Every setting on one page, made from the settings: `python -m pf2lora.cli.reference > docs/settings.md`."""

from __future__ import annotations

import dataclasses
from typing import Any

from pf2lora.cli.options import SHORTER
from pf2lora.methods import METHODS
from pf2lora.run.config import NAMED, TABLES
from pf2lora.settings import settings_of
from pf2lora.tasks import TASKS

HEAD = """# Settings

Made by `python -m pf2lora.cli.reference`; do not edit. In a TOML file each setting is in its table; on the command line
and in `federate()` it stands alone (`batch_size` is `--batch-size`). Without a default, the text says what is
taken.
"""


def reference() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for table, kind in TABLES.items():
        parts.append(f"## `[{table}]`\n\n{rows(table, kind)}")
    for name in TASKS.own:
        parts.append(f'## `[task]` with `name = "{name}"`\n\n{rows("task", TASKS[name])}')
    for name in METHODS.own:
        parts.append(f"## `[methods.{name}]`\n\n{method_rows(name)}")
    return "\n".join(parts)


def rows(table: str, kind: type) -> str:
    """One line for each setting of a table."""
    flat = {key: named for named, (inside, key) in NAMED.items() if inside == table}
    lines = ["| setting | flag | default | |", "| --- | --- | --- | --- |"]
    for name, field in settings_of(kind).items():
        spelled = flat.get(name, name)
        flag = SHORTER.get(name, f"--{spelled.replace('_', '-')}")
        lines.append(f"| `{name}` | `{flag}` | {shown(field.default)} | {field.metadata['help']} |")
    return "\n".join(lines) + "\n"


def method_rows(name: str) -> str:
    """One line for each parameter of a method; those that `[training]` has take its value unless they are given."""
    kind = METHODS[name]
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    shared = {setting for table in TABLES.values() for setting in settings_of(table)}
    lines = ["| parameter | default |", "| --- | --- |"]
    for parameter in kind.parameters():
        own = kind.run_defaults.get(parameter, shown(defaults.get(parameter)))
        default = "the run's" if parameter in shared else own
        lines.append(f"| `{parameter}` | {default} |")
    return "\n".join(lines) + "\n"


def shown(default: Any) -> str:
    """A default as TOML would have it."""
    if default in (None, "", ()):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return ", ".join(f"`{item}`" for item in default)
    return f"`{default}`"


if __name__ == "__main__":
    print(reference(), end="")
