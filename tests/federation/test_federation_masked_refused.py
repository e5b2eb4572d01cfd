"""Masked runs in which somebody cheats, or that cannot be: nothing is revealed, and the reason is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from masked_federation import make_masked, masked_plan, more_kit, plain
from small_federation import SITES, Small, make_plan, make_small

from pf2lora.errors import UserError
from pf2lora.federation.flare.keys import remove
from pf2lora.federation.protocol import messages, ring, shamir
from pf2lora.federation.protocol.allow_list import AllowList, read_request
from pf2lora.federation.protocol.identity import KitIdentity
from pf2lora.federation.protocol.masked_fields import SEALED
from pf2lora.federation.protocol.messages import Malformed
from pf2lora.federation.protocol.secure_sum import Keys, Roster, SiteSum
from pf2lora.federation.protocol.server_sum import ServerSum
from pf2lora.federation.protocol.shamir import SHARE
from pf2lora.federation.protocol.site_masks import context
from pf2lora.federation.protocol.stopping import QuorumMissed
from pf2lora.federation.protocol.wire import Wire

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = "it refused the round's masks or has lost them"


def tampered(kind: str, change: Callable[[dict[str, Any]], object]) -> Callable[[str, bytes], bytes]:
    """What site-2 sends of a kind is changed on its way."""

    def tamper(site: str, data: bytes) -> bytes:
        fields, tensors = messages.decode(data)
        if site != "site-2" or fields["kind"] != kind:
            return data
        change(fields)
        return messages.encode(fields, tensors)

    return tamper


UNREADABLE: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("keys", lambda fields: fields["keys"].update(masking="zz")),
    ("keys", lambda fields: fields.update(kind="update")),
    ("keys", lambda fields: fields.update(round=7)),
    ("shares", lambda fields: fields["shares"].pop("site-1")),
]


@pytest.mark.parametrize(("kind", "change"), UNREADABLE)
def test_a_site_whose_message_is_wrong_is_left_out(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object]
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.tamper = tampered(kind, change)
    record = small.round()
    assert record["answered"] == ["site-1", "site-3", "site-4"]
    assert list(record["refused"]) == ["site-2"]


# --- one site that wants to stop a run ----------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"masking": "00" * 32}, {"signature": "00"}, {"seed_hash": "11" * 32}])
def test_keys_that_their_site_did_not_sign_leave_out_that_site_alone(
    tmp_path: Path, change: dict[str, str]
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    small.tamper = tampered("keys", lambda fields: fields["keys"].update(change))
    record = small.round()
    assert record["answered"] == ["site-1", "site-3", "site-4"]
    assert record["refused"] == {
        "site-2": "the keys of site-2 are not signed by a certificate of the federation"
    }


def test_keys_of_low_order_that_a_site_did_sign_leave_out_that_site_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    keys = SiteSum.keys

    def low_order(own: SiteSum) -> Keys:
        if own.site != "site-2":
            return keys(own)
        shown = replace(keys(own), masking="00" * 32, signature="")
        return replace(shown, signature=own.identity.sign(shown.signed_part(own.context, own.site)))

    monkeypatch.setattr(SiteSum, "keys", low_order)
    record = small.round()
    assert record["answered"] == ["site-1", "site-3", "site-4"]
    assert "none with which a secret could be shared" in record["refused"]["site-2"]


def garbled(*receivers: str) -> Callable[[str, bytes], bytes]:
    """Site-2's shares for these sites cannot be opened."""
    bad = dict.fromkeys(receivers, "00" * SEALED)
    return tampered("shares", lambda fields: fields["shares"].update(bad))


def test_shares_that_one_site_cannot_open_cost_nobody_the_round(tmp_path: Path) -> None:
    plan = masked_plan("homlora", config={"rounds": 1})
    small = make_masked(tmp_path, plan)
    small.greet()
    small.tamper = garbled("site-1")
    record = small.round()
    assert record["refused"] == {} and record["answered"] == list(SITES)
    assert not any("unopened" in told for told in record["scores"].values())
    assert_plain(small, tmp_path, SITES)


def test_who_deals_shares_that_most_cannot_open_is_left_out_and_named(tmp_path: Path) -> None:
    """Nobody else is; the round is tried again at once, and later ones do without the site from their beginning."""
    plan = masked_plan("homlora", config={"rounds": 2})
    small = make_masked(tmp_path, plan)
    small.greet()
    small.tamper = garbled("site-1", "site-3")
    record = small.round()
    others = ("site-1", "site-3", "site-4")
    assert record["answered"] == list(others)
    assert record["refused"] == {"site-2": "2 of 3 sites cannot open the shares that it dealt"}
    assert_plain(small, tmp_path, others)
    small.messages.clear()
    assert small.round()["refused"] == record["refused"]
    assert {site for site, _ in small.messages} == set(others) and len(small.messages) == 4 * len(others)


def test_a_site_that_says_it_can_open_nobodys_shares_costs_nobody_anything(tmp_path: Path) -> None:
    """One word against everybody's: it is believed as far as its own shares go."""
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    others = ["site-1", "site-3", "site-4"]
    small.tamper = tampered("update", lambda fields: fields.update(unopened=others))
    record = small.round()
    assert record["answered"] == list(SITES) and record["refused"] == {}
    assert_plain(small, tmp_path, SITES)


def test_who_deals_shares_of_no_secret_spoils_one_round_and_is_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_masked(tmp_path, masked_plan("homlora"))
    small.greet()
    split, shares = shamir.split, SiteSum.shares

    def badly(own: SiteSum, roster: Roster) -> dict[str, bytes]:
        with monkeypatch.context() as patch:
            if own.site == "site-2":
                patch.setattr(shamir, "split", lambda secret, *how: split(bytes(32), *how))
            return shares(own, roster)

    monkeypatch.setattr(SiteSum, "shares", badly)
    record = small.round()
    assert record["answered"] == [] and small.coordinator.common is None
    assert set(record["refused"].values()) == {
        "the round has no sum (the shares that site-2 dealt do not give its secret)"
    }
    record = small.round()
    assert record["answered"] == ["site-1", "site-3", "site-4"]
    assert record["refused"] == {"site-2": "the shares that site-2 dealt do not give its secret"}


def test_a_wrong_share_at_the_end_costs_nobody_the_round(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora", config={"rounds": 1}))
    small.greet()
    wrong = {"site-1": ["seed", "00" * SHARE]}
    small.tamper = tampered("unmask", lambda fields: fields["unmask"].update(wrong))
    assert small.round()["answered"] == list(SITES)
    assert_plain(small, tmp_path, SITES)


def assert_plain(small: Small, root: Path, sites: tuple[str, ...]) -> None:
    """The masked result is that of the plain run of these sites."""
    other = make_small(root / "plain", plain(small.plan))
    other.greet()
    other.round(list(sites))
    found, expected = small.coordinator.common, other.coordinator.common
    assert found is not None and expected is not None
    assert (found - expected).abs().max() <= 1e-6


# --- a server that wants to see one site's update -----------------------------------------------------------


class Accomplice:
    """A server with certificates of its own authority beside site-1's: it follows the protocol to the letter, with a
    round of its own choosing, and takes off the masks."""

    def __init__(self, small: Small, identities: dict[str, KitIdentity]) -> None:
        self.session, self.site = small.sessions["site-1"], "site-1"
        among = list(dict.fromkeys([self.site, *identities, *SITES]))[: len(SITES)]
        which = context(small.plan, 1)
        self.own = {name: SiteSum(name, which, who, among, 3) for name, who in identities.items()}
        self.sum = ServerSum(which, small.setups[self.site].method.leaves(1).size, among)

    def ask(self, kind: str, **fields: Any) -> messages.Message:
        request = messages.encode({"kind": kind, "round": 1} | fields)
        return messages.decode(self.session.answer(read_request(request)))

    def update(self) -> torch.Tensor | None:
        """Site-1's numbers in the ring; None where it refuses."""
        self.sum.roster[self.site] = Keys(**self.ask("keys").fields["keys"])
        self.sum.roster |= {name: own.keys() for name, own in self.own.items()}
        roster = {site: asdict(keys) for site, keys in self.sum.roster.items()}
        told = self.ask("shares", roster=roster)
        if told.kind == "problem":
            return None
        self.sum.take_shares(self.site, {s: bytes.fromhex(v) for s, v in told.fields["shares"].items()})
        for name, own in self.own.items():
            self.sum.take_shares(name, own.shares(self.sum.roster))
        sealed = {site: data.hex() for site, data in self.sum.shares_for(self.site).items()}
        update = self.ask("train", shares=sealed)
        if update.kind == "problem":
            return None
        leaves = self.session.setup.method.leaves(1)
        self.sum.add(self.site, messages.to_flat(leaves, update.tensors, torch.int64))
        for name, own in self.own.items():
            nothing = torch.zeros(self.sum.count, dtype=torch.int64)
            self.sum.add(name, own.mask(nothing, self.sum.shares_for(name)))
        for name, own in self.own.items():
            self.sum.take_unmasking(name, own.unmask(self.sum.answered))
        told = self.ask("unmask", answered=self.sum.answered)
        shares = {s: (what, bytes.fromhex(share)) for s, (what, share) in told.fields["unmask"].items()}
        self.sum.take_unmasking(self.site, shares)
        return self.sum.unmask()


@pytest.mark.parametrize("names", [("server", "clinic-removed"), ("clinic-removed", "clinic-not-named")])
def test_a_server_gets_nothing_with_certificates_of_who_is_not_in_the_plan(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """`provision` gives the server one under the name `server`; any site's that was ever signed is another."""
    small = make_masked(tmp_path, masked_plan("homlora"))
    accomplices = {name: more_kit(tmp_path, name) for name in names}
    assert Accomplice(small, accomplices).update() is None


def test_with_so_many_of_the_plans_sites_as_are_a_majority_with_one_more_a_server_reads_that_one(
    tmp_path: Path,
) -> None:
    """What masks cannot hide, and the docs say so: two of four sites, with the server, read a third one's update."""
    small = make_masked(tmp_path, masked_plan("homlora"))
    kits = {site: KitIdentity.of(file.parent.parent / "startup") for site, file in small.files.items()}
    assert Accomplice(small, {"site-2": kits["site-2"]}).update() is None
    found = Accomplice(small, {site: kits[site] for site in ("site-2", "site-3")}).update()
    saved = small.sessions["site-1"].latest
    assert found is not None and saved is not None
    (own,) = small.setups["site-1"].method.send(saved.state, 1)[1]
    assert (ring.from_ring(found) - own.double()).abs().max() <= ring.STEP


def test_with_a_site_that_it_has_removed_a_site_is_in_no_sum(tmp_path: Path) -> None:
    """Whatever the plan and the server say: those who would read site-1's update by the test above get nothing."""
    small = make_masked(tmp_path, masked_plan("homlora"))
    kits = {site: file.parent.parent for site, file in small.files.items()}
    (kits["site-1"] / "startup" / "fed_client.json").touch()
    remove(kits["site-1"], "site-3")
    known = {site: KitIdentity.of(kits[site] / "startup") for site in ("site-2", "site-3")}
    assert Accomplice(small, known).update() is None
    small.greet()
    record = small.round()
    assert record["answered"] == ["site-2", "site-3", "site-4"] and list(record["refused"]) == ["site-1"]
    assert small.round(["site-1", "site-2", "site-4"])["answered"] == ["site-1", "site-2", "site-4"]
    remove(kits["site-1"], "site-3", back=True)
    assert small.round()["answered"] == list(SITES)


def test_a_site_is_in_the_plans_rounds_and_in_no_others(tmp_path: Path) -> None:
    """Each would be one more update, and in a private run more ε than the noise was found for."""
    plan = masked_plan("homlora", config={"rounds": 4, "participation": 0.75})
    small = make_masked(tmp_path, plan)
    small.greet()
    (away,) = set(SITES) - set(plan.chosen(1))
    for kind, number, site in (
        *((kind, number, "site-1") for kind in ("keys", "train", "unmask") for number in (5, 50, 5000)),
        *((kind, 6, "site-1") for kind in ("measure", "finish")),
        ("keys", 1, away),
        ("train", 1, away),
    ):
        fields = {"answered": list(SITES)} if kind == "unmask" else {}
        request = read_request(messages.encode({"kind": kind, "round": number} | fields))
        with pytest.raises(Malformed, match=r"the plan has (4 rounds|others)"):
            small.sessions[site].answer(request)
    assert not (tmp_path / "state" / away / "trial" / "round-000001.safetensors").exists()
    small.run()  # and the plan's own, to the end


# --- what is no masked run ----------------------------------------------------------------------------------


def test_a_server_without_masks_gets_no_keys(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora"))
    request = messages.Message({"kind": "keys", "round": 1}, {})
    with pytest.raises(Malformed, match="in a run without masks"):
        small.sessions["site-1"].answer(request)
    with pytest.raises(Malformed, match="a message of kind 'keys'"):
        AllowList(None, None, Wire()).check(messages.encode({"kind": "keys", "round": 1}))


def test_an_update_without_masks_does_not_leave_a_site(tmp_path: Path) -> None:
    small = make_masked(tmp_path, masked_plan("homlora"))
    setup = small.setups["site-1"]
    own = messages.to_tensors(
        setup.method.leaves(1), setup.method.send(setup.initial, 1)[1][0], None, torch.float32
    )
    update = messages.encode({"kind": "update", "round": 1, "steps": 2, "loss": 1.0}, own)
    with pytest.raises(Malformed, match=r"is torch\.float32, not torch\.int64"):
        AllowList(setup.method, None, Wire(masked=True)).check(update)


def test_keys_are_of_a_run_and_a_round() -> None:
    plan = masked_plan()
    assert len({context(plan, 1), context(plan, 2), context(masked_plan(config={"lr": 0.5}), 1)}) == 3
    assert context(plan, 1) == context(masked_plan(deadline=5.0), 1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"wire": "bfloat16"}, "masked updates travel as whole numbers"),
        ({"config": {"weighting": "size"}}, "it must be 'uniform'"),
        ({"sites": SITES[:2]}, "a masked run has 3 sites or more"),
    ],
)
def test_what_masks_do_not_fit_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        masked_plan("homlora", **changes)
    with pytest.raises(UserError, match="sends nothing"):
        masked_plan("local")


def test_a_site_says_how_many_a_sum_must_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its policy's min_sites is 5, and the run's sites a round are 4"):
        make_masked(tmp_path, masked_plan("homlora"), "min_sites = 5\n")
    small = make_masked(tmp_path / "four", masked_plan("homlora"), "min_sites = 4\nmasked = true\n")
    small.greet()
    with pytest.raises(QuorumMissed, match=f"site-1: {MASKS}"):
        small.round(["site-1", "site-2", "site-3"])
