"""Federations of question answering and generation, small enough for any test, and the same run of the local engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_federation import Small, make_small, settings, write_data, write_model, write_policy
from small_federation import make_plan as make_classification_plan
from tiny_tasks import write_chat_task, write_generation_task, write_question_task
from torch import Tensor

from pf2lora.engines.local import train
from pf2lora.federation.protocol.plan import Plan
from pf2lora.run.comparison import prepare
from pf2lora.run.config import Config, from_dict, from_settings, merged
from pf2lora.run.set_up import set_up
from pf2lora.run.validation import SampledJudges

TASKS = ("classification", "question-answering", "generation")
NAMES = ("site-1", "site-2", "site-3")
LENGTHS: dict[str, dict[str, Any]] = {
    "question-answering": {"max_length": 40, "stride": 4},
    "generation": {"max_length": 64, "max_new_tokens": 6, "beams": 2},
}
LABELS = {"question-answering": ("answer", "no answer"), "generation": ()}
WRITERS = {"question-answering": write_question_task, "generation": write_generation_task}


@dataclass
class World:
    """A task's model and files under `root`, the plan of a run on them, and its federation in one process."""

    root: Path
    plan: Plan
    model: Path
    data: dict[str, Any]
    small: Small

    def config(self) -> Config:
        """The same run for `pf2lora train`."""
        own = {"model": {"name": str(self.model), "device": "cpu"}, "data": self.data}
        return from_dict(merged(self.plan.config, own), "test")

    def local_common(self) -> Tensor:
        """The common adapter that the local engine ends with."""
        config = self.config()
        trial = set_up(prepare(config), self.plan.method, config.training.seed)
        judges = SampledJudges(trial)
        *_, last = train(trial.method, trial.F, trial.state, trial.source, trial.schedule, judges=judges)
        return last.common[0]


def make_world(
    root: Path,
    task: str,
    method: str = "pf2lora",
    names: Sequence[str] = NAMES,
    *,
    chat: bool = False,
    **changes: Any,
) -> World:
    """A federation of `task`, or of conversations (`chat`); `changes` are the run's settings. A client is trained at a
    time, as at a site."""
    changes = {"clients_per_pass": 1} | changes
    if task == "classification":
        plan = make_classification_plan(method, tuple(names), config=changes)
        data = {part: [str(root / part)] for part in ("test", "validation")} | {
            "clients": [str(root / "train")]
        }
        write_model(root / "model")
        write_data(root, tuple(names))
        return World(root, plan, root / "model", data, make_small(root, plan))
    model, files = (write_chat_task if chat else WRITERS[task])(root, names)
    config = from_settings(settings(**changes) | LENGTHS[task] | {"task": task, "method": [method]})
    plan = Plan.of(config, "trial", tuple(names), ("chat",) if chat else LABELS[task])
    sites = {}
    for name, file in zip(names, files):
        sites[name] = root / "sites" / name / "site.toml"
        sites[name].parent.mkdir(parents=True)
        write_policy(sites[name].parent)
        sites[name].write_text(
            f'model = "{model}"\nstate = "{root / "state" / name}"\ndevice = "cpu"\n[data]\nclients = ["{file}"]\n'
        )
    return World(root, plan, model, {"clients": [str(file) for file in files]}, Small(plan, root, sites))
