"""Whatever one site says, it costs the others nothing: broken messages by the hundred, in the server's session."""

from __future__ import annotations

import math
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from fuzz_mutations import bytes_changed, tensors_changed
from small_federation import SITES, Small

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.agreement import agreeing_first
from pf2lora.federation.protocol.messages import decode, encode
from pf2lora.federation.protocol.outcome import scores_at
from pf2lora.federation.protocol.run_status import read_final

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


def broken(data: bytes, random: Random) -> bytes:
    """A message with something wrong in it, unless chance has it that nothing is."""
    return random.choice([bytes_changed, tensors_changed, tensors_changed])(data, random)


def test_no_bytes_of_one_site_cost_the_others_a_round(small: Small) -> None:
    """Broken hellos, updates and scores by the hundred: their site is left out alone, or what it sent was harmless."""
    random, honest = Random(0), small.coordinator
    hello = small.ask({"site-2": honest.hello()})["site-2"]
    for _ in range(150):
        with suppress(messages.Malformed, UserError):  # what the controller leaves a site out for
            agreeing_first({"site-1": hello, "site-2": broken(hello, random)}, honest.allow_list(None))
            honest.register("site-2", broken(hello, random))
    honest.register("site-2", hello)
    answers = small.ask(honest.requests(list(SITES), {1}))
    refused = 0
    for _ in range(150):
        bad = answers | {"site-2": broken(answers["site-2"], random)}
        attempt = deepcopy(honest)
        attempt.save = lambda: None  # type: ignore[method-assign]
        record = attempt.finish_round(bad, 0.0, [])
        assert {"site-1", "site-3", "site-4"} <= set(record["answered"]), record["refused"]
        for why in record["refused"].values():
            assert why.isprintable() and "\n" not in why and len(why) < 500
        refused += "site-2" in record["refused"]
    assert refused > 75


def test_no_scores_of_one_site_cost_the_others_theirs(small: Small) -> None:
    """The last answers, broken by the hundred: what is written down of them can be read as a result."""
    random, honest, names = Random(0), small.coordinator, dict.fromkeys(("accuracy", "loss"))
    while not honest.over:
        small.round()
    last = small.ask(honest.finish_requests(list(SITES)))
    refused = 0
    for _ in range(150):
        bad = broken(last["site-2"], random)
        honest.finish(last | {"site-2": bad})
        final = read_final(honest.folder)
        others = {site: decode(last[site]).fields for site in SITES if site != "site-2"}
        assert {site: final[site] for site in others} == others
        said = final["site-2"]
        if said["kind"] == "problem" and "reason" in said:
            refused += 1
            assert said["reason"].isprintable() and len(said["reason"]) < 500
        for point in ("served", "before", "deploy", "validation"):
            for values in (scores_at(honest.plan, final, point, names) or {}).values():
                assert all(value is None or math.isfinite(value) for value in values)
    assert refused > 75
    honest.finish(last)
    assert read_final(honest.folder)["site-2"] == decode(last["site-2"]).fields


@pytest.mark.parametrize("kind", ["served", "deploy", "validation", "before", "more"])
def test_scores_that_are_not_as_declared_are_refused(small: Small, kind: str) -> None:
    honest = small.coordinator
    while not honest.over:
        small.round()
    last = small.ask(honest.finish_requests(list(SITES)))
    fields = decode(last["site-2"]).fields
    rows: dict[str, Any] = {"rows": 4, "accuracy": 2.0}
    values: tuple[Any, ...] = (
        [],
        {},
        {"accuracy": 1.0},
        rows | {"rows": -1},
        rows | {"rows": 2**60},
        rows | {"rows": 1.5},
        rows | {"accuracy": "1"},
        rows | {"accuracy": None},
        rows | {"accuracy": 10**400},
        rows | {"accuracy": {"accuracy": 1.0}},
        rows | {f"m{i}": 1.0 for i in range(1000)},
    )
    for value in values:
        honest.finish(last | {"site-2": encode(fields | {kind: value})})
        final = read_final(honest.folder)
        assert final["site-2"]["kind"] == "problem" and "'" + kind + "'" in final["site-2"]["reason"]
        assert final["site-1"] == decode(last["site-1"]).fields
