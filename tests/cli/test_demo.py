"""What `pf2lora demo` runs, without running it: the defaults that it is to show, and nothing to be warned of."""

from __future__ import annotations

import warnings
from dataclasses import replace

from pf2lora.cli.demo import demo_config
from pf2lora.core.rates import RATE
from pf2lora.methods import BOUNDS, SETS
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_settings
from pf2lora.run.first_notes import without_validation


def test_the_demo_shows_the_defaults_with_validation() -> None:
    """But for `lr`, which is above the default as 40 steps are few, no rate or choice is the demo's own."""
    config = demo_config()
    default = from_settings({})
    training, plain = config.training, default.training
    assert training.client_lr == "auto" and config.data.validation_ratio > 0
    assert config.adapter == default.adapter and config.methods == {}
    own = ("method", "rounds", "steps", "batch_size", "evaluate_every", "lr")
    assert replace(training, **{name: getattr(plain, name) for name in own}) == plain
    assert isinstance(training.lr, float) and training.lr > RATE and plain.lr == "auto"


def test_the_demo_compares_federating_with_not_federating() -> None:
    methods = demo_config().training.method
    assert methods == SETS["paper"] and set(BOUNDS) < set(methods)
    assert {"pf2lora", "homlora", "per-fedavg", "hetlora"} < set(methods)


def test_the_demo_has_nothing_to_warn_of() -> None:
    with warnings.catch_warnings(record=True) as warned:
        workload = prepare(demo_config())
    assert not [w for w in warned if "pf2lora" in w.filename]
    assert (*workload.notes, *without_validation(workload), *workload.task.notes) == ()
    assert all(client.train and client.validation and client.test for client in workload.clients)
