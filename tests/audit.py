"""`make audit`: known vulnerabilities of the pinned packages, by pip-audit.

pip-audit ends well where it could look nothing up ("skipped", as behind a mirror without PyPI's JSON interface). Here
that is a failure: nothing was audited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = (
    *("-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip"),
    *("--format", "json", "--progress-spinner", "off"),
)


def verdict(found: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """The exit code and what to say, from the packages as pip-audit's JSON has them."""
    skipped = [p for p in found if "skip_reason" in p]
    lines = [
        f"{p['name']} {p['version']}: {v['id']}"
        + (f", fixed in {', '.join(v['fix_versions'])}" if v["fix_versions"] else "")
        for p in found
        for v in p.get("vulns", ())
    ]
    if skipped:
        lines.append(f"{len(skipped)} of {len(found)} packages were not audited: {skipped[0]['skip_reason']}")
    elif not found:
        lines.append("no package was audited")
    elif not lines:
        return 0, [f"no known vulnerabilities in {len(found)} packages"]
    return 1, lines


def main() -> int:
    """Ask, and say."""
    done = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"nothing was audited: pip-audit could not ask the vulnerability database ({last})")
        return 1
    code, lines = verdict(found)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
