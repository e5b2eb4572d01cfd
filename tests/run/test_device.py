"""Which device a run gets, and what is set before its first product."""

from __future__ import annotations

import os

import pytest
import torch

from pf2lora.errors import UserError
from pf2lora.run.workload import WITHOUT_WORKSPACE, choose_device


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in WITHOUT_WORKSPACE:
        monkeypatch.setenv(variable, "")  # so that what is set is undone
        monkeypatch.delenv(variable)


def test_a_cpu_gets_nothing(environment: None) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert not WITHOUT_WORKSPACE.keys() & os.environ.keys()


def test_cublas_is_left_without_a_workspace_unless_somebody_said_otherwise(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert [choose_device(name) for name in ("auto", "cuda:1")] == [
        torch.device("cuda"),
        torch.device("cuda:1"),
    ]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "4096"


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="sees no CUDA device"):
        choose_device("cuda")
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        choose_device("gpu")
