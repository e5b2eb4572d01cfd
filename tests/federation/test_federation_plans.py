"""Plans that a lead made by hand: what is a site's own affair is not theirs to set."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_federation import SITES, make_plan, write_data, write_model, write_site_file

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

from site_executor import HELLO, ask, context_of, lead_of

from pf2lora.federation.flare.executor import BODY, SiteExecutor
from pf2lora.federation.protocol.messages import decode
from pf2lora.federation.protocol.plan import SHARED, NotShared, Plan
from pf2lora.federation.protocol.problems import PROBLEMS
from pf2lora.federation.protocol.signed_plan import SignedPlan
from pf2lora.run.config import from_settings, merged

pytestmark = pytest.mark.usefixtures("one_thread")

SITE = SITES[0]
OWN: list[tuple[str, dict[str, Any]]] = [
    ("test_limit", {"data": {"test_limit": 8}}),  # and 9 in the next run: the difference is one row's loss
    ("limit", {"data": {"limit": 9}}),
    ("test_ratio", {"data": {"test_ratio": 0.9}}),
    ("column of the label", {"task": {"label": "hiv"}}),
    ("column of the text", {"task": {"text": "name"}}),
    ("model", {"model": {"name": "/models/another"}}),
    ("device", {"model": {"device": "cuda:7"}}),
    ("precision", {"model": {"precision": "float32"}}),
    ("output", {"output": {"trackers": ["tensorboard"]}}),
]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit of a site with data and model, which limits nothing by itself."""
    root = tmp_path_factory.mktemp("site")
    write_model(root / "model")
    write_data(root, (SITE,))
    rows = root / "train" / f"{SITE}.jsonl"
    more = {"name": "w1 w2", "hiv": "neg"}
    lines = [json.dumps(json.loads(line) | more) for line in rows.read_text().splitlines()]
    rows.write_text("\n".join(lines) + "\n")
    write_site_file(root / "kit" / "local" / "site.toml", root, SITE)
    return root / "kit"


def by_hand(config: dict[str, Any]) -> str:
    """A plan's text with tables that `submit` would have left out."""
    plan = json.loads(make_plan("homlora", (SITE,)).to_json())
    return json.dumps(plan | {"config": merged(plan["config"], config)})


def told(text: str, kit: Path) -> dict[str, Any]:
    """What the site answers to the hello of a run whose plan this is, signed by a lead."""
    lead = lead_of(kit)
    signed = SignedPlan(text, lead.certificate, signed_at=int(time.time()))
    executor = SiteExecutor(text, signed.certificate, lead.sign(signed.signed_part()), signed.signed_at)
    answer = ask(executor, context_of(SITE, kit / "local"), HELLO)
    if executor.session is not None:
        executor.session.folder.close()
    return dict(decode(answer[BODY]).fields)


@pytest.mark.parametrize(("what", "config"), OWN, ids=[what for what, _ in OWN])
def test_a_site_takes_no_signed_plan_that_sets_what_is_its_own(
    what: str, config: dict[str, Any], kit: Path
) -> None:
    with pytest.raises(NotShared, match="each site's own affair"):
        Plan.from_json(by_hand(config))
    fields = told(by_hand(config), kit)
    assert (fields["kind"], fields["code"]) == ("problem", "plan") and "site's own" in PROBLEMS["plan"]
    assert not (kit.parent / "state" / SITE / "trial").exists()


def test_a_lead_s_own_plan_is_taken_whatever_their_settings_name(kit: Path) -> None:
    named = {"model": "bert", "device": "cpu", "label": "hiv", "test_limit": 8, "clients": ["a.jsonl"]}
    short = {"rounds": 3, "steps": 2, "batch_size": 4, "rank": 4, "method": ["homlora"]}
    plan = Plan.of(from_settings(named | short), "taken", (SITE,), ("neg", "pos"))
    assert set(plan.config) == set(SHARED) and "hiv" not in plan.to_json()
    assert told(plan.to_json(), kit)["kind"] == "hello"


def test_a_plan_is_looked_at_however_it_is_made() -> None:
    plan = make_plan("homlora", (SITE,))
    with pytest.raises(NotShared, match=r"\[data\]"):
        replace(plan, config=merged(plan.config, {"data": {"test_limit": 8}}))
