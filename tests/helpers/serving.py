"""A run served in a thread of the test's own process, and small runs to be served."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from little_world import FAST
from openai import OpenAI
from tiny_tasks import write_generation_task

import pf2lora
from pf2lora.run.saved import load_run
from pf2lora.serve.access import Access
from pf2lora.serve.app import create_app
from pf2lora.serve.server import address_of, listen, make_server
from pf2lora.serve.service import Limits, Service

NAMES = ("north", "south", "west")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 9}


def write_generation_run(folder: Path, names: Sequence[str] = NAMES) -> Path:
    """A run of three clients whose models write different texts."""
    model, files = write_generation_task(folder, names)
    settings: dict[str, Any] = FAST | {"max_length": 96, "max_new_tokens": 0, "client_lr": 3.0, "lr": 0.03}
    clients = [str(file) for file in files]
    pf2lora.federate(model=str(model), clients=clients, task="generation", out=folder / "run", **settings)
    return folder / "run"


class Served:
    """A server that runs: its address, and the service behind it."""

    def __init__(self, address: str, service: Service) -> None:
        self.address, self.service = address, service

    def client(self, token: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=token, max_retries=0, timeout=30)


def complete(served: Served, model: str, prompt: str, **options: Any) -> str:
    return served.client().completions.create(model=model, prompt=prompt, **GREEDY | options).choices[0].text


@contextmanager
def serving(
    run: Path, access: Access | None = None, tls: tuple[Path, Path] | None = None, **limits: Any
) -> Iterator[Served]:
    given = Limits(**limits)
    service = Service(load_run(run, device="cpu"), given)
    server = make_server(create_app(service, access or Access()), given, *(tls or ()))
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Served(address_of(bound, "127.0.0.1", tls=tls is not None), service)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


class Pause:
    """The worker makes no turn until it may go on; `asked` is set when it would have begun one."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()


@contextmanager
def standing_still(served: Served) -> Iterator[Pause]:
    pause, turn = Pause(), served.service.worker.turn

    def waiting() -> None:
        pause.asked.set()
        pause.go_on.wait(20)
        turn()

    served.service.worker.turn = waiting  # type: ignore[method-assign]
    try:
        yield pause
    finally:
        pause.go_on.set()
