"""Runs with client-level differential privacy: what the noise does to them, what they say, and what they refuse."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from little_world import LEARNING, World, command_line, make_world
from torch import Tensor

import pf2lora
from pf2lora.core.layout import Layout
from pf2lora.core.privacy import Mechanism
from pf2lora.engines.local import train
from pf2lora.errors import UserError
from pf2lora.methods.homlora import HomLoRA
from pf2lora.run import folder
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.privacy import epsilon, noise_multiplier
from pf2lora.run.result import RoundRecord, load_result
from pf2lora.run.set_up import Trial, set_up

PRIVATE: dict[str, Any] = {"dp_noise": 1.5, "dp_clip": 0.02, "dp_noise_seed": 7}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def trial_of(world: World, *seeds: int, method: str = "pf2lora", **changes: Any) -> Trial:
    workload = prepare(from_settings(world.settings(method=[method], **changes)))
    return set_up(workload, method, *(seeds or (0,)))


def commons(trial: Trial) -> list[Tensor]:
    """The servers' answers of all rounds, `(seeds, n)` each."""
    rounds = train(trial.method, trial.F, trial.state, trial.source, trial.schedule)
    found = [done.common.clone() for done in rounds]
    trial.model.remove()
    return found


# --- the rounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pf2lora", "pf2lora-joint", "homlora", "per-fedavg"])
def test_each_round_is_the_mechanism_on_what_the_clients_sent(method: str, world: World) -> None:
    """common = start + (Σ clip(sent − start) + σC·z) / K, by hand from the states before the average."""
    trial = trial_of(world, method=method, **PRIVATE)
    start = trial.state.x[0, : trial.method.layout.shared].clone().double()
    mechanism = Mechanism(0.02, 1.5, seed=7)
    for done in train(trial.method, trial.F, trial.state, trial.source, trial.schedule):
        sent = done.before.x[:, : trial.method.layout.shared].double()
        assert float((sent - start).norm(dim=1).min()) > 0.02  # the clip cuts
        by_hand = start + mechanism.mean_update(sent - start, 3, 0, done.number)
        torch.testing.assert_close(done.common[0], by_hand.float(), rtol=0, atol=1e-6)
        assert torch.equal(
            done.served.x[:, : trial.method.layout.shared], done.common.expand(3, -1)
        )  # all are served the same
        start = done.common[0].double()
    trial.model.remove()


def test_a_clients_data_moves_a_round_by_the_clip_over_the_clients_at_most(
    world: World, tmp_path: Path
) -> None:
    """Two federations that differ in all of one client's rows: zero against its update is C / K, so two are 2C / K."""
    other = tmp_path / "west.jsonl"
    rows = [json.loads(line) for line in world.clients[2].read_text().splitlines()]
    flip = {"pos": "neg", "neg": "pos"}
    other.write_text("".join(json.dumps(row | {"label": flip[row["label"]]}) + "\n" for row in rows))
    clients = [str(p) for p in world.clients]
    settings: dict[str, Any] = PRIVATE | {"rounds": 1, "steps": 5, "lr": 0.02}
    one = commons(trial_of(world, **settings))[0]
    two = commons(trial_of(world, **settings, clients=[*clients[:2], str(other)]))[0]
    moved = float((one - two).double().norm())
    assert 0 < moved <= 2 * 0.02 / 3 * (1 + 1e-4)


def test_without_noise_and_with_a_wide_clip_it_is_the_plain_average(world: World) -> None:
    plain = commons(trial_of(world))
    private = commons(trial_of(world, dp_noise=1e-12, dp_clip=1e3, dp_noise_seed=0))
    torch.testing.assert_close(private, plain, rtol=0, atol=1e-6)


def test_seeds_side_by_side_are_what_each_is_alone_with_noise_of_its_own(world: World) -> None:
    together = commons(trial_of(world, 3, 4, **PRIVATE))
    alone = [commons(trial_of(world, seed, **PRIVATE)) for seed in (3, 4)]
    for number, both in enumerate(together):
        torch.testing.assert_close(both, torch.cat([run[number] for run in alone]), rtol=0, atol=1e-5)
    noise = [run[0][0] - trial_of(world, s).state.x[0, : run[0].shape[1]] for run, s in zip(alone, (3, 4))]
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 0.3


def test_clients_one_by_one_are_clients_together(world: World) -> None:
    together, one_by_one = (commons(trial_of(world, clients_per_pass=n, **PRIVATE)) for n in (3, 1))
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-5)


def test_the_denominator_is_of_those_who_were_to_take_part(world: World) -> None:
    """Two of three: the noise is divided by two."""
    trial = trial_of(world, participation=0.6, dp_noise=1e4, dp_clip=0.05, dp_noise_seed=1)
    start = trial.state.x[0, : trial.method.layout.shared].clone()
    first = commons(trial)[0][0]
    assert float((first - start).std()) == pytest.approx(1e4 * 0.05 / 2, rel=0.1)


def test_a_bad_client_counts_as_zero_and_nobody_is_judged_by_the_others(world: World) -> None:
    trial = trial_of(world, method="homlora", rounds=1, **PRIVATE)
    assert not trial.schedule.compare_updates and trial_of(world).schedule.compare_updates
    broken = torch.tensor([1.0, math.nan, 1.0])
    start = trial.state.x[0].clone().double()
    (done,) = train(
        trial.method, lambda *of: trial.F(*of) * broken, trial.state, trial.source, trial.schedule
    )
    assert list(done.left_out) == [1]
    sent = done.before.x[[0, 2]].double()
    by_hand = start + Mechanism(0.02, 1.5, seed=7).mean_update(sent - start, 3, 0, 1)
    torch.testing.assert_close(done.common[0], by_hand.float(), rtol=0, atol=1e-6)


def test_real_noise_differs_from_run_to_run(world: World) -> None:
    one, two = (commons(trial_of(world, dp_noise=1.5, dp_clip=0.05)) for _ in range(2))
    assert not torch.equal(one[0], two[0])


def test_clients_that_do_not_begin_alike_are_refused(world: World) -> None:
    trial = trial_of(world, **PRIVATE)
    trial.state.x[1, 0] += 1
    with pytest.raises(UserError, match="its clients do not begin a round with the same common adapter"):
        commons(trial)


class Killed(BaseException):
    """The end of a process, as far as a test can play it."""


def interrupted(world: World, out: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """A run that ends while its third round is written down."""
    append = folder.append_metrics

    def killed(out: Path, method: str, seed: int, record: RoundRecord) -> None:
        if record.round == 3:
            raise Killed
        append(out, method, seed, record)

    with monkeypatch.context() as patch:
        patch.setattr(folder, "append_metrics", killed)
        with pytest.raises(Killed):
            pf2lora.federate(**world.settings(checkpoint_every=1, **settings), out=out)


def test_a_resumed_run_draws_the_noise_of_the_rounds_that_are_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a seed, to the bit what an unbroken run has; ε is of all rounds, done before or after."""
    settings = PRIVATE | {"rounds": 4}
    interrupted(world, tmp_path / "broken", monkeypatch, **settings)
    pf2lora.federate(**world.settings(checkpoint_every=1, **settings), out=tmp_path / "broken", resume=True)
    pf2lora.federate(**world.settings(checkpoint_every=1, **settings), out=tmp_path / "whole")
    files = [tmp_path / name / "state" / "common.safetensors" for name in ("broken", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_resumed_run_costs_all_its_rounds_and_an_epsilon_is_for_their_number(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, target = {"dp_noise": 2.0, "dp_clip": 0.05}, {"dp_epsilon": 4.0, "dp_clip": 0.05}
    again: dict[str, Any] = {"checkpoint_every": 1, "evaluate_every": 1, "rounds": 6}
    for name, settings in (("noise", noise), ("target", target)):
        interrupted(world, tmp_path / name, monkeypatch, rounds=4, evaluate_every=1, **settings)
    longer = pf2lora.federate(**world.settings(**again, **noise), out=tmp_path / "noise", resume=True)
    (run,) = longer.methods["pf2lora"].runs
    assert run.privacy is not None and run.privacy.epsilon == epsilon(2.0, 1e-5, 6)
    with pytest.raises(UserError, match="dp_epsilon's noise is that of 4 rounds"):
        pf2lora.federate(**world.settings(**again, **target), out=tmp_path / "target", resume=True)


# --- what a run says ---------------------------------------------------------------------------------------


def test_epsilon_is_in_result_table_and_report(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = tmp_path / "run"
    asked = ("--dp-epsilon", 4, "--dp-clip", 0.1, "--dp-delta", 1e-4, "--out", run)
    code, out, _ = command_line(monkeypatch, capsys, "train", *world.base, *asked)
    assert code == 0
    (seed,) = load_result(run).methods["pf2lora"].runs
    assert seed.privacy is not None and (seed.privacy.rounds, seed.privacy.clip) == (2, 0.1)
    assert 4 * (1 - 1e-6) <= (seed.privacy.epsilon or 0) <= 4
    assert seed.privacy.noise == pytest.approx(noise_multiplier(4, 1e-4, 2))
    said = "ε = 4 at δ = 0.0001 for each client (2 rounds, noise"
    assert said in " ".join(out.split())
    assert said in (run / "report.html").read_text(encoding="utf8")


def test_only_the_rounds_that_a_client_takes_part_in_cost(world: World) -> None:
    asked = world.settings(rounds=6, participation=0.3, dp_noise=2.0, dp_clip=0.1, seeds=2)
    (first, second) = pf2lora.federate(**asked).methods["pf2lora"].runs
    for run in (first, second):
        took_part = [sum(r.train_loss[k] is not None for r in run.rounds) for k in range(3)]
        assert run.privacy is not None and run.privacy.rounds == max(took_part) < 6
        assert run.privacy.epsilon == epsilon(2.0, 1e-5, max(took_part))


def test_a_seeded_noise_has_no_epsilon(world: World) -> None:
    result = pf2lora.federate(**world.settings(**PRIVATE))
    (run,) = result.methods["pf2lora"].runs
    assert run.privacy is not None and run.privacy.epsilon is None
    assert "no ε: the noise was drawn from a seed" in run.privacy.sentence()


def test_a_run_without_privacy_says_none_and_who_sends_nothing_needs_none(world: World) -> None:
    assert pf2lora.federate(**world.settings()).methods["pf2lora"].runs[0].privacy is None
    private = pf2lora.federate(**world.settings(method="local", **PRIVATE))
    assert private.methods["local"].runs[0].privacy is None
    plain = pf2lora.federate(**world.settings(method="local"))
    assert private.served("loss") == plain.served("loss")


def test_the_common_adapter_of_a_private_run_is_the_last(world: World, tmp_path: Path) -> None:
    """Which round has the least validation loss would tell of the clients' rows."""
    from safetensors.torch import load_file

    noisy = {"dp_noise": 30.0, "dp_clip": 0.3, "dp_noise_seed": 1}
    learning = LEARNING | {"rounds": 4, "evaluate_every": 1, "validation_ratio": 0.2}
    asked = world.settings(**learning | noisy, method="homlora")
    kept = {}
    for keep in ("best", "last"):
        pf2lora.federate(**asked, keep=keep, out=tmp_path / keep)
        kept[keep] = load_file(tmp_path / keep / "state" / "common.safetensors")
    losses = [r.validation_loss for r in load_result(tmp_path / "best").methods["homlora"].runs[0].rounds]
    means = [math.fsum(v or 0 for v in row or []) for row in losses]
    assert means.index(min(means)) < 3, "a test that cannot fail: the last round is the best"
    assert all(torch.equal(kept["best"][name], kept["last"][name]) for name in kept["last"])


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dp_epsilon": 1.0}, "dp_epsilon and dp_noise are both given"),
        ({"method": "hetlora"}, "hetlora has no differential privacy: the ranks"),
        ({"method": "centralized"}, "centralized pools everybody's data"),
        ({"weighting": "size"}, "it must be 'uniform'"),
        ({"patience": 2, "validation_ratio": 0.2}, "the number of rounds is fixed"),
        ({"dp_delta": 0.5}, "with 3 clients it must be below 0.333"),
    ],
)
def test_what_would_let_something_out_beside_the_noise_is_refused(
    settings: dict[str, Any], said: str, world: World
) -> None:
    with pytest.raises(UserError, match=said):
        pf2lora.federate(**world.settings(dp_noise=1.0, **settings))


@dataclass(frozen=True)
class Chatty(HomLoRA):
    """Sends something beside the common adapter."""

    name: ClassVar[str] = "chatty"
    label: ClassVar[str] = "Chatty"

    def leaves(self, number: int) -> Layout:
        return Layout.of([*self.layout.shared_entries, self.layout.shared_entries[0].beside("more")])


def test_a_method_of_ones_own_that_sends_more_is_refused(world: World) -> None:
    with pytest.raises(UserError, match="chatty has no differential privacy: something else than"):
        pf2lora.federate(**world.settings(method=Chatty, dp_noise=1.0))
