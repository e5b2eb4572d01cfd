"""Whatever one site says, it costs the others nothing: broken messages by the hundred, in the server's session."""

from __future__ import annotations

import math
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from fuzz_mutations import bytes_changed, tensors_changed
from masked_federation import make_masked, masked_plan
from small_federation import SITES, Small

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages, ring
from pf2lora.federation.protocol.agreement import agreeing_first
from pf2lora.federation.protocol.allow_list import read_request
from pf2lora.federation.protocol.answers import Answer
from pf2lora.federation.protocol.identity import Authority
from pf2lora.federation.protocol.masked import MaskedRound
from pf2lora.federation.protocol.messages import decode, encode
from pf2lora.federation.protocol.outcome import scores_at
from pf2lora.federation.protocol.run_status import read_final
from pf2lora.tasks.classification.task import METRICS

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
    random, honest, names = (
        Random(0),
        small.coordinator,
        {name: METRICS[name] for name in ("accuracy", "loss")},
    )
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


# --- a masked run's own messages ----------------------------------------------------------------------------

OTHERS = [site for site in SITES if site != "site-2"]


@pytest.fixture
def masked(tmp_path: Path) -> Small:
    """A masked federation whose sites have said hello."""
    made = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 12}))
    made.greet()
    return made


def test_no_bytes_of_one_site_in_the_masks_steps_get_further_than_that_site(masked: Small) -> None:
    """Broken keys, shares and unmaskings by the hundred; keys that are taken are those that the site signed."""
    random, authority = Random(0), Authority.of(masked.files["site-1"].parent.parent / "startup")
    attempt = MaskedRound(masked.coordinator, authority, masked.exchange)
    sums = {site: setup.masks for site, setup in masked.setups.items()}
    values = {site: torch.randn(attempt.sum.count) for site in SITES}

    def requests(kind: str, **fields: Any) -> dict[str, bytes]:
        return dict.fromkeys(SITES, messages.encode({"kind": kind, "round": 1} | fields))

    def fuzzed(kind: str, asked: dict[str, bytes], taken: dict[str, Any]) -> None:
        """One step with everybody's own answers, after those of site-2 were broken in every way."""
        honest = masked.ask(asked)
        for site in OTHERS:
            assert attempt.take(kind, site, honest[site]) is None
        refused, seen = 0, list[object]()
        for _ in range(150):
            answer = attempt.take(kind, "site-2", broken(honest["site-2"], random))
            assert (answer is None) == ("site-2" in taken) and set(OTHERS) <= set(taken)
            seen += [taken.pop("site-2")] if answer is None else []
            if isinstance(answer, Answer):
                refused += 1
                assert answer.why.isprintable() and len(answer.why) < 500
        assert refused > 75
        assert attempt.take(kind, "site-2", honest["site-2"]) is None
        assert kind != "keys" or all(found == taken["site-2"] for found in seen)

    fuzzed("keys", requests("keys"), attempt.sum.roster)
    roster = {site: vars(keys) for site, keys in attempt.sum.roster.items()}
    fuzzed("shares", requests("shares", roster=roster), attempt.sum.sealed)
    for site, masks in sums.items():
        assert masks is not None and masks.now is not None
        attempt.sum.add(site, masks.now.mask(ring.to_ring(values[site], 4), attempt.sum.shares_for(site)))
    fuzzed("unmask", requests("unmask", answered=list(SITES)), attempt.sum.unmasked)
    exact = torch.stack([own.double() for own in values.values()]).sum(0)
    assert (ring.from_ring(attempt.sum.unmask()) - exact).abs().max() <= 4 * ring.STEP


def test_a_masked_round_goes_on_around_one_sites_broken_messages(masked: Small) -> None:
    random = Random(1)
    for kind in ("keys", "keys", "unmask", "unmask", "shares", "shares"):

        def tamper(site: str, data: bytes, kind: str = kind) -> bytes:
            meant = site == "site-2" and messages.decode(data).kind == kind
            return broken(data, random) if meant else data

        masked.tamper = tamper
        record = masked.round()
        assert set(OTHERS) <= set(record["answered"]), record["refused"]


def test_no_bytes_of_a_server_in_the_masks_steps_are_more_than_refused(masked: Small) -> None:
    """A site answers, says that it is not in the sum, or names what it cannot read; nothing else happens to it."""
    random, session = Random(2), masked.sessions["site-1"]
    keys = masked.ask(dict.fromkeys(SITES, messages.encode({"kind": "keys", "round": 1})))
    roster = {site: messages.decode(data).fields["keys"] for site, data in keys.items()}
    for kind, fields in (
        ("keys", {}),
        ("shares", {"roster": roster}),
        ("unmask", {"answered": list(SITES)}),
    ):
        request = messages.encode({"kind": kind, "round": 1} | fields)
        for _ in range(100):
            with suppress(messages.Malformed, UserError):
                asked = read_request(broken(request, random))
                assert messages.decode(session.answer(asked)).kind in (asked.kind, "problem")
