"""The common adapter that all sites share is of the best round, by the median of the losses that they tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_federation import SITES, local_outcome, make_plan, make_small, write_data, write_model
from validated_federation import AUTO, PRUNES, common_of, record_of

from pf2lora.errors import UserError
from pf2lora.federation.protocol import messages
from pf2lora.federation.protocol.server_checkpoint import Best, best_file, read_best, write_best

pytestmark = pytest.mark.usefixtures("one_thread", "sized_every_round")


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("method", ["pf2lora", "homlora", "per-fedavg", "hetlora", "rolora"])
def test_the_common_adapter_is_of_the_round_that_a_local_run_takes(
    tmp_path: Path, method: str, keep: str
) -> None:
    """The middle of two sites' losses is their mean, by which a local run goes."""
    write_model(tmp_path / "model")
    write_data(tmp_path, SITES[:2])
    plan = make_plan(method, SITES[:2], config=AUTO | PRUNES | {"keep": keep, "lr": 0.3})
    small = make_small(tmp_path, plan)
    small.run()
    local, trial = local_outcome(tmp_path, plan)
    common, number = common_of(small)
    assert common is not None and number is not None and local.common is not None
    assert number == local.record.common_round == record_of(small, trial).common_round
    assert number == 4 if keep == "last" else number < 4 or method == "rolora"
    (whole,) = trial.method.common(trial.state.x[:1].cpu(), common.unsqueeze(0), number)
    assert (whole - local.common).abs().max() <= 5e-4  # two rounds differ by a thousand times as much


def test_one_sites_loss_does_not_choose_what_all_share(tmp_path: Path) -> None:
    def small_losses(site: str, data: bytes) -> bytes:
        fields = messages.decode(data).fields
        if site == "site-1" and "validation" in fields:
            found = fields["validation"]
            lie = 1e-9 if fields["round"] == 2 else 1e9
            fields["validation"] = found | {"loss": lie, "common": lie}
            return messages.encode(fields, messages.decode(data).tensors)
        return data

    plan = make_plan("homlora", config=AUTO)
    honest = make_small(tmp_path / "honest", plan)
    lied_to = make_small(tmp_path / "lied-to", plan, tamper=small_losses)
    for small in (honest, lied_to):
        small.run()
    assert common_of(honest)[1] == common_of(lied_to)[1] != 1


def test_the_best_common_adapter_is_not_of_a_round_that_the_server_lost(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        write_best(tmp_path, Best(number, 1 / number), torch.ones(2))
    (tmp_path / "best-copy.safetensors").write_bytes(b"")
    assert [best_file(tmp_path, done) for done in (2, 3, 4, 9)] == [
        None,  # three are kept: those before serve a server that goes back
        *(tmp_path / f"best-{number:06d}.safetensors" for number in (2, 3, 4)),
    ]
    found, common = read_best(tmp_path / "best-000003.safetensors")
    assert found == (3, 1 / 3) and torch.equal(common, torch.ones(2))
    (tmp_path / "best-000003.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"best-000003\.safetensors"):
        read_best(tmp_path / "best-000003.safetensors")


def test_what_was_told_in_a_round_that_the_server_lost_does_not_choose(tmp_path: Path) -> None:
    """Round 3 is the best by what sites told in a round 4 that is then lost; told again, round 2 is."""
    losses = {2: 3.0, 3: 2.0, 4: 1.0, 5: 4.0}  # by the round in which they are told

    def told(site: str, data: bytes) -> bytes:
        message = messages.decode(data)
        if "validation" not in message.fields:
            return data
        loss = message.fields["validation"]["rows"] * losses[message.fields["round"]]
        return messages.encode(
            message.fields | {"validation": message.fields["validation"] | {"loss": loss}}, message.tensors
        )

    small = make_small(tmp_path, make_plan("homlora", config=AUTO), tamper=told)
    small.greet()
    for _ in range(4):
        small.round()
    served = small.coordinator.common
    assert read_best(tmp_path / "server" / "best-000003.safetensors")[0].loss == 1.0
    (tmp_path / "server" / "round-000004.safetensors").unlink()
    small.start_server()
    assert small.coordinator.done == 3 and common_of(small)[1] == 2
    losses[4] = 3.5
    small.round()
    small.coordinator.finish(small.ask(small.coordinator.finish_requests(list(small.files))))
    assert served is not None and small.coordinator.common is not None
    assert torch.equal(small.coordinator.common, served)  # the round itself is as it was
    common, number = common_of(small)
    small.start_server()
    assert number == common_of(small)[1] == 2
    kept = best_file(tmp_path / "server", 4)
    assert kept is not None and common is not None and torch.equal(read_best(kept)[1], common)
    assert best_file(tmp_path / "server", 9) == kept
