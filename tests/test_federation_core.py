"""Both halves of a federated run, in one process and without FLARE: the same numbers, only x leaves, roll back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from small_federation import LABELS, SITES, Small, make_plan, make_small, write_model, write_site_file

from pf2lora import trial as trials
from pf2lora.config import from_dict
from pf2lora.engines.local import Schedule, train
from pf2lora.errors import UserError
from pf2lora.experiment import prepare
from pf2lora.federation import wire
from pf2lora.federation.coordinator import Coordinator, QuorumMissed
from pf2lora.federation.files import StateFolderError
from pf2lora.federation.guard import Guard, Refused
from pf2lora.federation.plan import Plan
from pf2lora.federation.state import StateFolder, leaves
from pf2lora.method import State
from pf2lora.methods import METHODS
from pf2lora.methods.bilevel import ROUNDOFF

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for a second thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FEDERATED = [name for name, kind in METHODS.items() if kind.federated]


def local_run(root: Path, plan: Plan) -> tuple[State, torch.Tensor, Any]:
    """The local engine's last state, its common x and its trial, on the same files."""
    data = {"clients": [str(root / "train")], "test": [str(root / "test")]}
    config = from_dict(
        dict(plan.config) | {"model": str(root / "model"), "device": "cpu", "data": data}, "test"
    )
    trial = trials.set_up(prepare(config), plan.method, config.seed)
    schedule = Schedule(config.rounds, config.steps, config.participation, config.weighting, seed=config.seed)
    *_, last = train(trial.method, trial.F, trial.state, trial.source, schedule)
    return last.served, last.common, trial


@pytest.mark.parametrize("method", FEDERATED)
@pytest.mark.parametrize(
    "variant", [{}, {"participation": 0.5, "weighting": "size"}], ids=["all", "half-by-size"]
)
def test_every_method_gives_the_local_engines_numbers(
    tmp_path: Path, method: str, variant: dict[str, Any]
) -> None:
    plan = make_plan(method, config={"rounds": 4} | variant)
    small = make_small(tmp_path, plan)
    small.run()
    state, common, _ = local_run(tmp_path, plan)
    assert small.coordinator.common is not None
    assert common.norm() > 0.1
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):  # y and the served x of every site, too
        rounds = small.workers[site].folder.rounds()
        saved = small.workers[site].folder.load(rounds[-1], small.works[site].initial) if rounds else None
        own = saved.state if saved else small.works[site].initial
        assert own.y.numel() == 0 or (own.y[0] - state.y[k]).abs().max() <= 1e-5
        served = small.works[site].method.receive(own, small.coordinator.common)
        assert (served.x[0] - state.x[k]).abs().max() <= 1e-5


def test_a_site_leaves_the_second_order_term_out_where_the_local_engine_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROUNDOFF, "float32", 10.0)  # every share is under it
    plan = make_plan("pf2lora", config={"rounds": 4, "hypergradient": "auto"})
    small = make_small(tmp_path, plan)
    small.run()
    state, common, _ = local_run(tmp_path, plan)
    assert small.coordinator.common is not None
    assert (small.coordinator.common - common).abs().max() <= 1e-5
    for k, site in enumerate(SITES):
        own = small.workers[site].folder.newest_before(99, small.works[site].initial).state
        assert own.opt.age[0] == state.opt.age[k] > 0  # it was left out, and a site remembers that


def test_the_scores_are_the_local_engines(tmp_path: Path) -> None:
    plan = make_plan("per-fedavg", config={"evaluate_every": 1})
    small = make_small(tmp_path, plan)
    small.run()
    final = json.loads((tmp_path / "server" / "final.json").read_text())
    state, _, trial = local_run(tmp_path, plan)
    scores = trials.evaluate(trial.workload, trial.model, *trials.served_models(trial, state, 3))
    for k, site in enumerate(SITES):
        served = final[site]["served"]
        assert served["rows"] == 20
        assert served["accuracy"] / 20 == pytest.approx(scores["accuracy"][k])
        assert served["loss"] / 20 == pytest.approx(scores["loss"][k], abs=1e-5)


def test_hetlora_sites_send_and_get_only_their_ranks(tmp_path: Path) -> None:
    plan = make_plan(
        "hetlora", config={"methods": {"hetlora": {"r_min": 1, "r_max": 6, "gamma": 0.5, "penalty": 0.1}}}
    )
    small = make_small(tmp_path, plan)
    small.run()
    seen = set()
    for site, data in small.messages:
        fields, tensors = wire.decode(data)
        if fields["kind"] != "update":
            continue
        rounds = small.workers[site].folder.rounds()
        if fields["round"] == rounds[-1]:
            saved = small.workers[site].folder.load(rounds[-1], small.works[site].initial)
            sent = sum(t.numel() for t in tensors.values())
            assert [sent] == small.works[site].method.sent_numbers(saved.state)
            seen.add(sent)
            down = small.coordinator.for_site(site)
            assert sum(t.numel() for t in down.values()) == sent
    assert len(seen) > 1  # the payloads differ


def test_bfloat16_halves_the_bytes_and_stays_close(tmp_path: Path) -> None:
    totals, commons = [], []
    for name in ("float32", "bfloat16"):
        plan = make_plan("pf2lora", wire=name)
        small = make_small(tmp_path / name, plan)
        small.run()
        totals.append(sum(sum(t.nbytes for t in wire.decode(d).tensors.values()) for _, d in small.messages))
        commons.append(small.coordinator.common)
    assert totals[1] * 2 == totals[0]
    assert 0 < (commons[0] - commons[1]).norm() / commons[0].norm() < 0.05


# --- only x leaves ------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Small:
    made = make_small(tmp_path, make_plan("pf2lora"))
    made.greet()
    return made


def guard_of(small: Small, site: str = "site-1") -> Guard:
    work = small.works[site]
    return Guard(work.layout, work.metrics, torch.float32)


def update(small: Small, site: str = "site-1") -> wire.Message:
    request = small.coordinator.requests([site], set())[site]
    return wire.decode(small.workers[site].answer(request))


def test_the_guard_lets_an_update_pass(small: Small) -> None:
    message = update(small)
    assert message.fields["kind"] == "update" and message.tensors  # else the guard had nothing to judge
    guard_of(small).check(wire.encode(message.fields, message.tensors))  # raises Refused


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
def test_the_guard_refuses_what_is_not_declared(small: Small, leak: str) -> None:
    (fields, tensors), work = update(small), small.works["site-1"]
    state = small.workers["site-1"].latest.state  # type: ignore[union-attr]
    first = min(name for name in tensors if name.endswith(".A"))
    data = None
    if leak == "y":
        tensors["bert.encoder.layer.0.attention.self.query.C"] = state.y[0]
    elif leak == "optimizer":
        tensors[first] = list(leaves(state))[2][0]
    elif leak == "text":
        fields["note"] = "w1 w2 w3"
    elif leak == "metadata":
        data = save(tensors, metadata={wire.FIELDS: json.dumps(fields), "author": "w1 w2"})
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
    data = data or wire.encode(fields, tensors)
    if leak == "trailing":
        data += b"w1 w2 w3"
    with pytest.raises(Refused):
        Guard(work.layout, work.metrics, torch.float32).check(data)


def test_no_tensor_of_y_is_in_the_bytes_of_a_run(small: Small) -> None:
    while small.coordinator.done < 3:
        small.round()
    sent = b"".join(data for _, data in small.messages)
    for site in SITES:
        work, worker = small.works[site], small.workers[site]
        trained = work.method.layout
        assert trained.shared == trained.size
        for number in worker.folder.rounds():
            state = worker.folder.load(number, work.initial).state
            for name, tensor in small_layout(small, site, state).items():
                if tensor.abs().max() > 0:
                    assert tensor.flatten()[:8].contiguous().numpy().tobytes() not in sent, name
            moments = state.opt.mean[0, :8].contiguous().numpy().tobytes()
            assert moments not in sent
    x = wire.decode(small.messages[-1][1]).tensors
    some = next(iter(x.values()))
    assert some.flatten()[:8].contiguous().numpy().tobytes() in sent  # the search finds what is there


def small_layout(small: Small, site: str, state: State) -> dict[str, torch.Tensor]:
    """The tensors of y, by name."""
    F = small.works[site].F
    model = F.args[0]  # type: ignore[attr-defined]
    return {name: t[0] for name, t in model.y.unpack(state.y).items()}


# --- sane updates -------------------------------------------------------------------------------------------


def changed(data: bytes, how: str) -> bytes:
    fields, tensors = wire.decode(data)
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
    return wire.encode(fields, tensors)


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


# --- faults -------------------------------------------------------------------------------------------------


def test_a_server_that_lost_a_round_takes_the_sites_back_with_it(tmp_path: Path) -> None:
    """The site has saved round 2, the server only round 1: both go on from round 1, as if nothing had been."""
    plan = make_plan("pf2lora")
    straight = make_small(tmp_path / "straight", plan)
    straight.run()
    broken = make_small(tmp_path / "broken", plan)
    broken.greet()
    broken.round()
    broken.ask(
        broken.coordinator.requests(list(SITES), set())
    )  # round 2 is trained and saved; its answers are lost
    assert broken.workers["site-1"].folder.rounds() == [1, 2]
    for worker in broken.workers.values():
        assert worker.folder.lock is not None
        worker.folder.lock.close()
    broken.start_server()
    assert broken.coordinator.done == 1
    broken.workers = {site: broken.start_site(site) for site in SITES}
    broken.run()
    assert torch.equal(broken.coordinator.common, straight.coordinator.common)  # type: ignore[arg-type]


def test_a_run_is_resumed_with_its_own_plan_only(tmp_path: Path) -> None:
    plan = make_plan("homlora")
    make_small(tmp_path, plan).run()
    longer = replace(plan, config=dict(plan.config) | {"rounds": 5}, deadline=9)
    assert Coordinator(longer, tmp_path / "server").done == 3
    for other in (replace(plan, config=dict(plan.config) | {"lr": 1.0}), replace(plan, sites=SITES[:3])):
        with pytest.raises(UserError, match=r"the run .trial. exists with another (config|sites)"):
            Coordinator(other, tmp_path / "server")


def test_a_site_that_was_away_returns_with_its_own_state(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("pf2lora", config={"rounds": 4}))
    small.greet()
    small.round()
    before = small.workers["site-2"].latest
    record = small.round(["site-1", "site-3", "site-4"])
    assert record["missing"] == ["site-2"]
    small.workers["site-2"].latest = None  # a new process
    small.round()
    after = small.workers["site-2"].latest
    assert before is not None and after is not None
    assert (after.round, after.steps) == (3, 4)
    assert int(after.state.opt.step[0]) == 4  # its own steps, not the federation's


def test_states_are_kept_for_a_few_rounds_only(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora", config={"rounds": 6}))
    small.run()
    assert small.workers["site-1"].folder.rounds() == [4, 5, 6]
    assert len(list((tmp_path / "server").glob("round-*.safetensors"))) == 2


def test_a_full_disk_stops_the_site_with_one_line(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    request = small.coordinator.requests(["site-1"], set())["site-1"]
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StateFolderError, match="is full") as caught:
        small.workers["site-1"].answer(request)
    assert caught.value.code == "disk-full"
    assert small.workers["site-1"].folder.rounds() == []
    assert not list(small.workers["site-1"].folder.folder.glob("*.partial"))


def test_an_unusable_state_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFolderError, match="cannot be written") as caught:
        StateFolder(tmp_path / "file" / "state", "trial").open()
    assert caught.value.code == "unwritable"
    first = StateFolder(tmp_path / "state", "trial")
    first.open()
    with pytest.raises(StateFolderError, match="in use by another process"):
        StateFolder(tmp_path / "state", "trial").open()


# --- what does not fit together -----------------------------------------------------------------------------


def test_another_base_model_is_named_before_round_1(tmp_path: Path) -> None:
    small = make_small(tmp_path, make_plan("homlora"))
    other = write_model(tmp_path / "other", seed=1)
    write_site_file(small.files["site-3"], tmp_path, "site-3", model=other)
    with pytest.raises(UserError, match="site-3 has another base model than site-1"):
        Small(small.plan, tmp_path / "again", fresh(tmp_path, small)).greet()


def fresh(root: Path, small: Small) -> dict[str, Path]:
    """The same site files, with state folders that nobody has locked."""
    files = {}
    for site, file in small.files.items():
        text = file.read_text().replace(str(root / "state"), str(root / "state-again"))
        file.write_text(text)
        files[site] = file
    return files


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("labels", "0" * 64, "site-2 has other labels than site-1"),
        ("version", "9.9", "site-2 runs pf2lora 9.9"),
        ("engine", "2.8.0", "site-2 runs nvflare 2.8.0"),
        ("layout", [], "site-2's common adapter"),
    ],
)
def test_sites_that_do_not_fit_are_named(small: Small, key: str, value: Any, line: str) -> None:
    facts = {"kind": "hello", "round": 1} | small.works["site-2"].facts | {key: value}
    with pytest.raises(UserError, match=line):
        small.coordinator.welcome("site-2", wire.encode(facts))


def test_a_label_that_nobody_named_is_the_sites_own_error(tmp_path: Path) -> None:
    make_small(tmp_path, make_plan("homlora"))
    plan = replace(make_plan("homlora"), labels=("neg", "other"))
    with pytest.raises(UserError, match="'pos' is unseen"):
        make_small(tmp_path, plan)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"sites": ("a", "b", "a")}, "two sites are called 'a'"),
        ({"sites": ("a", "b/c")}, "site name 'b/c'"),
        ({"sites": ()}, "at least one site"),
        ({"deadline": 0}, "deadline is 0"),
        ({"quorum": 1.5}, "quorum is 1.5"),
        ({"norm_limit": 1.0}, "norm_limit is 1.0"),
        ({"wire": "int8"}, "wire is 'int8'"),
        ({"method": "centralized"}, "no federation"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(changes: dict[str, Any], line: str) -> None:
    values = {
        "name": "trial",
        "config": {},
        "method": "pf2lora",
        "sites": ("a", "b"),
        "labels": LABELS,
    } | changes
    with pytest.raises(UserError, match=line):
        Plan(**values)


def test_a_plan_survives_its_journey() -> None:
    plan = make_plan("hetlora", deadline=5, wire="bfloat16")
    assert Plan.from_json(plan.to_json()) == plan
