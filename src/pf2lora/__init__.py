"""pf2lora: personalized federated LoRA fine-tuning of language models.

The public names are those of `__all__`; each is imported when it is used, so that `import pf2lora` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pf2lora import errors as errors
    from pf2lora.core.method import Method as Method
    from pf2lora.core.method import State as State
    from pf2lora.core.method import StepStats as StepStats
    from pf2lora.methods import METHODS as METHODS
    from pf2lora.report import build as build_report
    from pf2lora.run import events as events
    from pf2lora.run.api import federate as federate
    from pf2lora.run.api import sweep as sweep
    from pf2lora.run.config import Config as Config
    from pf2lora.run.result import Result as Result
    from pf2lora.run.result import load_result as load_result
    from pf2lora.run.saved import LoadedRun as LoadedRun
    from pf2lora.run.saved import load_run as load_run
    from pf2lora.tasks import TASKS as TASKS
    from pf2lora.tasks.settings import TaskSettings as TaskSettings

__version__ = "0.1.0"

_PUBLIC = {
    "federate": "pf2lora.run.api:federate",
    "sweep": "pf2lora.run.api:sweep",
    "Config": "pf2lora.run.config:Config",
    "Result": "pf2lora.run.result:Result",
    "load_result": "pf2lora.run.result:load_result",
    "LoadedRun": "pf2lora.run.saved:LoadedRun",
    "load_run": "pf2lora.run.saved:load_run",
    "build_report": "pf2lora.report:build",
    "METHODS": "pf2lora.methods:METHODS",
    "Method": "pf2lora.core.method:Method",
    "State": "pf2lora.core.method:State",
    "StepStats": "pf2lora.core.method:StepStats",
    "TASKS": "pf2lora.tasks:TASKS",
    "TaskSettings": "pf2lora.tasks.settings:TaskSettings",
    "errors": "pf2lora.errors",
    "events": "pf2lora.run.events",
}

__all__ = [
    "METHODS",
    "TASKS",
    "Config",
    "LoadedRun",
    "Method",
    "Result",
    "State",
    "StepStats",
    "TaskSettings",
    "__version__",
    "build_report",
    "errors",
    "events",
    "federate",
    "load_result",
    "load_run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pf2lora' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
