"""What may leave a site, and what the server takes: only x, and only sane updates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from small_federation import SITES, Small, make_plan, make_small

from pf2lora.core.method import State, tensors_of
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.allow_list import AllowList, read_request
from pf2lora.federation.protocol.stopping import QuorumMissed
from pf2lora.federation.protocol.wire import Wire

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")
pytestmark = pytest.mark.usefixtures("one_thread")


# --- only x leaves ------------------------------------------------------------------------------------------


def allow_list_of(small: Small, site: str = "site-1") -> AllowList:
    setup = small.setups[site]
    return AllowList(setup.method, setup.metrics, Wire())


def update(small: Small, site: str = "site-1") -> messages.Message:
    request = small.coordinator.requests([site], set())[site]
    return messages.decode(small.sessions[site].answer(read_request(request)))


def test_the_allow_list_lets_an_update_pass(small: Small) -> None:
    message = update(small)
    assert message.fields["kind"] == "update" and message.tensors  # else there was nothing to judge
    allow_list_of(small).check(messages.encode(message.fields, message.tensors))  # raises Malformed


@pytest.mark.parametrize(
    "leak",
    [
        "y",
        "optimizer",
        "text",
        "metadata",
        "per-example",
        "float",
        "extra-rank",
        "header",
        "kind",
        "trailing",
    ],
)
def test_the_allow_list_refuses_what_is_not_declared(small: Small, leak: str) -> None:
    (fields, tensors), setup = update(small), small.setups["site-1"]
    state = small.sessions["site-1"].latest.state  # type: ignore[union-attr]
    first = min(name for name in tensors if name.endswith(".A"))
    data = None
    if leak == "y":
        tensors["bert.encoder.layer.0.attention.self.query.C"] = state.y[0]
    elif leak == "optimizer":
        tensors[first] = tensors_of(state)[2][0]
    elif leak == "text":
        fields["note"] = "w1 w2 w3"
    elif leak == "metadata":
        data = save(tensors, metadata={messages.FIELDS: json.dumps(fields), "author": "w1 w2"})
    elif leak == "per-example":
        fields["served"] = {"rows": 2, "accuracy": [1.0, 0.0]}
    elif leak == "float":
        tensors[first] = tensors[first].double()
    elif leak == "extra-rank":
        tensors[first] = torch.cat([tensors[first], tensors[first]])
    elif leak == "header":
        fields["served"] = {"rows": 2, "first_text": 1.0}
    elif leak == "kind":
        fields["kind"] = "dump"
    data = data or messages.encode(fields, tensors)
    if leak == "trailing":
        data += b"w1 w2 w3"
    with pytest.raises(messages.Malformed):
        AllowList(setup.method, setup.metrics, Wire()).check(data)


SUMS = {"rows": 12, "loss": 7.5}
NO_SUMS: dict[str, Any] = {
    "a loss per example": {"rows": 2, "loss": [0.1, 0.2]},
    "a list of losses": [0.1, 0.2],
    "a mean alone": 0.3,
    "no rows": {"rows": 0, "loss": 0.0},
    "rows alone": {"rows": 2},
    "a loss alone": {"loss": 0.3},
    "half a row": {"rows": 0.5, "loss": 0.3},
    "another metric": SUMS | {"accuracy": 9.0},
    "a single example": SUMS | {"first": 0.1},
    "another candidate's loss": {"served": SUMS, "common": SUMS},
}


@pytest.mark.parametrize("sums", NO_SUMS.values(), ids=NO_SUMS)
@pytest.mark.parametrize("kind", ["update", "scores"])
def test_of_validation_a_sum_may_leave_and_nothing_else(small: Small, kind: str, sums: Any) -> None:
    fields, tensors = update(small)
    if kind == "scores":
        fields, tensors = {"kind": "scores", "round": 1, "served": {"rows": 20}}, {}
    here, there = allow_list_of(small), AllowList(small.setups["site-1"].method, None, Wire())
    for allow_list in (here, there):  # the site's and the server's
        allow_list.check(messages.encode(fields | {"validation": SUMS}, tensors))
        with pytest.raises(messages.Malformed, match="'validation'"):
            allow_list.check(messages.encode(fields | {"validation": sums}, tensors))


@pytest.mark.parametrize(
    "more",
    [
        {"deploy": {"rows": 20, "first_text": 1.0}},
        {"deploy": {"rows": 20, "accuracy": [1.0, 0.0]}},
        {"deploy": "personal_steps"},
        {"candidate": "common"},
        {"choice": {"candidate": "common", "round": 2}},
        {"before": {"rows": 20, "first_text": 1.0}},
    ],
)
def test_what_a_site_chose_stays_there(small: Small, more: dict[str, Any]) -> None:
    fields = {"kind": "scores", "round": 1, "served": {"rows": 20}}
    allow_list_of(small).check(messages.encode(fields | {"deploy": {"rows": 20, "accuracy": 12.0}}))
    with pytest.raises(messages.Malformed, match=f"'{min(more)}'"):
        allow_list_of(small).check(messages.encode(fields | more))


def test_no_tensor_of_y_is_in_the_bytes_of_a_run(small: Small) -> None:
    while small.coordinator.done < 3:
        small.round()
    sent = b"".join(data for _, data in small.messages)
    for site in SITES:
        setup, session = small.setups[site], small.sessions[site]
        trained = setup.method.layout
        assert trained.shared == trained.size
        for number in session.folder.rounds():
            state = session.folder.load(number, setup.initial).state
            for name, tensor in small_layout(small, site, state).items():
                if tensor.abs().max() > 0:
                    assert tensor.flatten()[:8].contiguous().numpy().tobytes() not in sent, name
            moments = state.opt.mean[0, :8].contiguous().numpy().tobytes()
            assert moments not in sent
    x = messages.decode(small.messages[-1][1]).tensors
    some = next(iter(x.values()))
    assert some.flatten()[:8].contiguous().numpy().tobytes() in sent  # the search finds what is there


def small_layout(small: Small, site: str, state: State) -> dict[str, torch.Tensor]:
    """The tensors of y, by name."""
    model = small.setups[site].trial.model
    return {name: t[0] for name, t in model.personal_layout.unpack(state.y).items()}


# --- sane updates -------------------------------------------------------------------------------------------


def changed(data: bytes, how: str) -> bytes:
    fields, tensors = messages.decode(data)
    if fields["kind"] != "update":
        return data
    first = min(name for name in tensors if name.endswith(".A"))
    if how == "names":
        tensors["other.A"] = tensors.pop(first)
    elif how == "shapes":
        tensors[first] = tensors[first].T.contiguous()
    elif how == "nan":
        tensors[first][0, 0] = torch.nan
    elif how == "norm":
        tensors = {n: t * 1000 for n, t in tensors.items()}
    elif how == "round":
        fields["round"] += 1
    elif how == "loss":
        fields["loss"] = "low"
    elif how == "nothing":
        tensors = {}
    elif how == "bytes":
        return data[:-3]
    return messages.encode(fields, tensors)


@pytest.mark.parametrize("how", ["names", "shapes", "nan", "norm", "round", "bytes", "loss", "nothing"])
def test_an_insane_update_is_refused_and_the_round_goes_on(tmp_path: Path, how: str) -> None:
    plan = make_plan("homlora")
    bad = make_small(tmp_path / "bad", plan, tamper=lambda s, d: changed(d, how) if s == "site-3" else d)
    bad.greet()
    record = bad.round()
    assert set(record["refused"]) == {"site-3"}
    assert record["answered"] == ["site-1", "site-2", "site-4"]
    without = make_small(tmp_path / "good", plan)
    without.greet()
    without.round(["site-1", "site-2", "site-4"])
    assert torch.equal(bad.coordinator.common, without.coordinator.common)  # type: ignore[arg-type]


def test_too_few_sane_updates_stop_the_run_with_one_line(tmp_path: Path) -> None:
    small = make_small(
        tmp_path, make_plan("homlora"), tamper=lambda s, d: changed(d, "nan") if s != "site-1" else d
    )
    small.greet()
    with pytest.raises(QuorumMissed, match=r"round 1: 1 of 4 .* quorum is 2 .*site-2.*not finite") as caught:
        small.round()
    assert "\n" not in str(caught.value)
    assert small.coordinator.done == 0
