"""A run that is being served: its models, the worker that holds them, and how a request becomes jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from pf2lora.run.saved import LoadedRun
from pf2lora.serve.answering import Answerer, RowsJob, rows_of
from pf2lora.serve.bodies import ChatBody, CompletionBody, PredictBody, Sampled
from pf2lora.serve.errors import ApiError, bad_request, too_slow
from pf2lora.serve.models import own_names, served_models
from pf2lora.serve.prompts import Prompts
from pf2lora.serve.writing import Piece, TextJob, Writer
from pf2lora.tasks.generation.sampling import Sampler
from pf2lora.tasks.generation.task import Generation


@dataclass(frozen=True)
class Limits:
    """How much is served at once, and how large and how long a request may be."""

    batch: int = 16  # texts in one pass; of other tasks, requests
    queue: int = 64  # that wait behind them
    share: int | None = None  # of these, how many may be of one holder of a token; None: all
    body: int = 2**20  # bytes
    rows: int = 256  # of a request to /v1/predict
    length: int | None = None  # tokens of prompt and answer; None: the model's
    seconds: float = 120  # from a request to the end of its answer
    silence: float = 30  # seconds that a caller may keep a connection without a whole request

    @property
    def requests(self) -> int:
        """That may be there at once: those whose texts run or wait, and others that are read or refused meanwhile."""
        return 2 * (self.batch + self.queue) + 16


class Service:
    """The models of a run by name. A run of generation writes texts; runs of other tasks answer rows."""

    def __init__(self, loaded: LoadedRun, limits: Limits) -> None:
        self.loaded, self.limits = loaded, limits
        self.adapters = served_models(loaded)
        self.for_all = [name for name in own_names(loaded).values() if name in self.adapters]
        self.created = int((loaded.where / "state" / "run.json").stat().st_mtime)
        waiting = limits.batch, limits.queue, limits.share
        self.worker: Writer | Answerer
        self.prompts: Prompts | None = None
        if isinstance(loaded.task, Generation):
            self.prompts = Prompts(loaded.task, loaded.model, limits.length)
            self.worker = Writer(loaded.model, self.adapters, self.prompts, *waiting)
        else:
            self.worker = Answerer(loaded, self.adapters, *waiting)

    async def completion(self, body: CompletionBody, owner: str) -> Texts:
        prompts = await asyncio.to_thread(self.writing().of_texts, body.prompts)
        return self.texts(body, prompts, "prompt", owner)

    async def chat(self, body: ChatBody, owner: str) -> Texts:
        messages = [message.plain() for message in body.messages]
        prompt = await asyncio.to_thread(self.writing().of_chat, messages)
        return self.texts(body, [prompt], "messages", owner)

    def writing(self) -> Prompts:
        if self.prompts is None:
            task = self.loaded.task.name
            raise bad_request(f"this is a run of {task}, which writes no texts: POST /v1/predict asks it")
        return self.prompts

    def texts(self, body: Sampled, prompts: Sequence[list[int]], param: str, owner: str) -> Texts:
        """Put the texts of a request into the line."""
        mail, make = Mailbox(), self.writing()
        jobs = [
            TextJob(
                body.model,
                prompt,
                Sampler(body.temperature, body.top_p, None if body.seed is None else body.seed + i),
                tell=mail.tell,
                text=make.growing(body.stops),
                most=make.room(prompt, body.most_tokens, param),
                index=i,
                owner=owner,
            )
            for i, prompt in enumerate(prompt for prompt in prompts for _ in range(body.n))
        ]
        assert isinstance(self.worker, Writer)
        self.worker.submit(jobs)
        return Texts(jobs, mail, self.limits.seconds)

    async def predict(self, body: PredictBody, owner: str) -> list[dict[str, Any]]:
        if not isinstance(self.worker, Answerer):
            raise bad_request("this is a run of generation: POST /v1/completions or /v1/chat/completions")
        if len(body.inputs) > self.limits.rows:
            raise bad_request(
                f"{len(body.inputs)} inputs, and a request may have {self.limits.rows}", "inputs"
            )
        mail = Mailbox()
        job = RowsJob(body.model, rows_of(self.loaded, body.inputs), tell=mail.tell, owner=owner)
        self.worker.submit([job])
        try:
            found: list[dict[str, Any]] = await mail.next(time.monotonic() + self.limits.seconds)
        except TimeoutError:
            raise too_slow(self.limits.seconds) from None
        finally:
            job.cancelled = True
        return found


class Mailbox:
    """What the worker's thread tells, for the event loop to read."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def tell(self, event: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)

    async def next(self, deadline: float) -> Any:
        found = await asyncio.wait_for(self.queue.get(), max(0.0, deadline - time.monotonic()))
        if isinstance(found, ApiError):
            raise found
        return found


class Texts:
    """The texts of a request while they are written. Whoever stops reading them stops the writing."""

    def __init__(self, jobs: Sequence[TextJob], mail: Mailbox, seconds: float) -> None:
        self.jobs, self.mail, self.seconds = jobs, mail, seconds
        self.deadline = time.monotonic() + seconds

    async def pieces(self) -> AsyncIterator[Piece]:
        writing = len(self.jobs)
        try:
            while writing:
                piece: Piece = await self.mail.next(self.deadline)
                writing -= piece.finish is not None
                yield piece
        except TimeoutError:
            raise too_slow(self.seconds) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancelled = True
