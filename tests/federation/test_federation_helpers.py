"""A site whose batches are computed by several processes of its machine: the numbers of one, and its problems."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_federation import make_plan, write_data, write_model, write_site_file
from task_federation import make_world
from torch import Tensor

pytest.importorskip("nvflare", reason="nvflare is not installed (pip install 'pf2lora[federation]')")

import psutil
from site_executor import HELLO, ask, context_of, executor_of

from pf2lora.engines.helpers import Helpers
from pf2lora.errors import UserError
from pf2lora.federation.flare.executor import BODY, AllowListFilter
from pf2lora.federation.protocol.checkup import SiteCheckup
from pf2lora.federation.protocol.messages import Message, decode, encode
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE
from pf2lora.federation.protocol.site_setup import read_site_file, site_config

pytestmark = pytest.mark.usefixtures("one_thread", "no_java")

SITE = "site-1"
STATE = 'state = "'


class Site:
    """A site in a run of its own, as the server sees it; with so many processes."""

    def __init__(self, plan: Plan, file: Path, processes: int) -> None:
        self.file = with_processes(file, processes)
        self.executor = executor_of(plan, self.file.parent.parent)
        self.context = context_of(SITE, self.file.parent)

    def asked(self, request: bytes) -> Message:
        reply = ask(self.executor, self.context, request)
        return decode(AllowListFilter().process(reply, self.context)[BODY])

    def trained(self, rounds: int) -> list[dict[str, Tensor]]:
        """What it sends after each of so many rounds; the average is what it sent itself."""
        assert self.asked(HELLO).kind == "hello"
        sent: list[dict[str, Tensor]] = []
        for number in range(1, rounds + 1):
            arrives = sent[-1] if sent else {}
            sent.append(dict(self.asked(encode({"kind": "train", "round": number}, arrives)).tensors))
        return sent

    @property
    def y(self) -> Tensor:
        assert self.executor.session is not None and self.executor.session.latest is not None
        return self.executor.session.latest.state.y

    @property
    def helpers(self) -> Helpers:
        assert self.executor.session is not None
        found = self.executor.session.setup.trial.workload.task.helpers
        assert found is not None
        return found


def with_processes(file: Path, processes: int) -> Path:
    """A site's file beside another, with a state folder of its own."""
    other = file.parent.parent / f"{file.parent.name}-{processes}" / "local" / file.name
    other.parent.mkdir(parents=True)
    (other.parent / POLICY_FILE).write_text((file.parent / POLICY_FILE).read_text())
    text = file.read_text().replace(STATE, f"{STATE}{other.parent}")
    other.write_text(f"processes = {processes}\n{text}")
    return other


def assert_alike(one: Site, several: Site, rounds: int = 2) -> None:
    """Up to the order of summation in float32."""
    for alone, shared in zip(one.trained(rounds), several.trained(rounds), strict=True):
        assert alone.keys() == shared.keys() and max(t.norm() for t in alone.values()) > 0.01
        for name, tensor in alone.items():
            torch.testing.assert_close(shared[name], tensor, rtol=0, atol=5e-6)
    torch.testing.assert_close(several.y, one.y, rtol=0, atol=5e-6)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_data(tmp_path, (SITE,))
    return write_site_file(tmp_path / "kit" / "local" / "site.toml", tmp_path, SITE)


def plan_of(method: str = "pf2lora", **settings: Any) -> Plan:
    own: dict[str, Any] = {"batch_size": 7, "dropout": 0.1, "class_weights": "balanced", "micro_batch": 3}
    return make_plan(method, (SITE,), config=own | settings)


def test_two_processes_give_the_update_of_one_and_a_lost_one_is_a_line(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A real process, which opens no port; a killed one keeps nobody waiting."""
    plan = plan_of()
    several = Site(plan, file, 2)
    assert_alike(Site(plan, file, 1), several)
    (helper,) = several.helpers.running
    assert isinstance(helper.process, subprocess.Popen)
    assert psutil.Process(helper.process.pid).net_connections("inet") == []
    helper.process.kill()
    found = several.asked(encode({"kind": "train", "round": 3}))
    assert found.fields == {"kind": "problem", "round": 3, "code": "processes"}
    line = "pf2lora: site-1: process 2 of the 2 that share a batch has ended (killed by signal 9)"
    assert line in capfd.readouterr().err and not several.helpers.running


@pytest.mark.slow
def test_lost_processes_are_started_again_and_end_with_the_first(tmp_path: Path, file: Path) -> None:
    """By the next request that needs them, which has the numbers of an unbroken run. They read no rows: the files are
    gone then."""
    plan = plan_of("homlora")
    one, several = Site(plan, file, 1), Site(plan, file, 3)
    expected, sent = one.trained(2), several.trained(1)
    first, second = several.helpers.running
    second.process.kill()
    request = encode({"kind": "train", "round": 2}, sent[0])
    assert several.asked(request).fields["code"] == "processes"
    assert first.process.wait(10) == -9, "the others end, too"
    assert several.asked(HELLO).kind == "hello"
    for part in ("train", "test", "validation"):
        shutil.rmtree(tmp_path / part)
    for name, tensor in several.asked(request).tensors.items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=0, atol=5e-6)
    for helper in several.helpers.running:
        helper.channel.close()  # as when the first process is killed
        assert helper.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("question-answering", {"head": "frozen"}),
        ("generation", {"checkpointing": "on"}),
        ("generation", {"chat": True, "packing": True}),
        ("generation", {"hypergradient_mode": "exact", "method": "per-fedavg"}),
    ],
)
def test_every_task(tmp_path: Path, task: str, changes: dict[str, Any]) -> None:
    """Targets of several lengths, packed conversations, layers that are run again, a second derivative. A head
    that shifts the logits of all positions has no gradient, and AdamW makes whole steps of its rounding."""
    world = make_world(tmp_path, task, names=(SITE,), **changes)
    file = world.small.files[SITE]
    assert_alike(Site(world.plan, file, 1), Site(world.plan, file, 3))


@pytest.mark.slow
def test_the_doctor_takes_a_step_with_all_processes(file: Path) -> None:
    found = []
    for processes in (1, 2):
        own = with_processes(file, processes)
        checkup = SiteCheckup(replace(plan_of(), name="doctor"), own, SITE, of_run=False)
        for look in (checkup.own_file, checkup.data, checkup.model):
            look()
        found.append(checkup.step())
        assert not any("pf2lora.run.helper" in child.cmdline() for child in psutil.Process().children())
    one, two = (line.partition(" after ")[0] for line in found)
    assert one == two and " in 2 processes" in found[1] and " in " not in found[0]


def test_a_site_without_memory_says_so_and_comes_back(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Wherever it ended: in a process of its own, too, whose error is the first one's."""
    site = Site(plan_of(), file, 1)
    site.asked(HELLO)
    session = site.executor.session
    request = encode({"kind": "train", "round": 1})
    with monkeypatch.context() as patch:
        patch.setattr(session, "train", failing)
        assert site.asked(request).fields == {"kind": "problem", "round": 1, "code": "memory"}
    assert "pf2lora: site-1: no memory is left\n" in capfd.readouterr().err
    assert [site.asked(HELLO).kind, site.asked(request).kind] == ["hello", "update"]


def failing(*args: Any) -> bytes:
    raise torch.OutOfMemoryError("no memory is left")


def test_a_sites_file_says_how_many(file: Path) -> None:
    """They are not recorded: processes tell each other something in every step."""
    assert site_config(plan_of(), file)[0].model.graphs
    config, own = site_config(plan_of(), with_processes(file, 4))
    assert own.processes == 4 and not config.model.graphs
    for lines, wrong in (
        ("processes = 0", "processes is 0; it must be from 1 to 64"),
        ('processes = "all"', "processes"),
    ):
        file.write_text(f"{lines}\n{file.read_text()}")
        with pytest.raises(UserError, match=wrong):
            read_site_file(file)
        file.write_text(file.read_text().partition("\n")[2])
    file.write_text("processes = 2\n" + file.read_text().replace('"cpu"', '"cuda:1"'))
    with pytest.raises(UserError, match="device is 'cuda:1', and 2 processes would all take it"):
        read_site_file(file)
