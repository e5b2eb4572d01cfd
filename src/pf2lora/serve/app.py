"""The HTTP interface: OpenAI's endpoints for texts, `/v1/predict` for labels and answers, `/health`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from pf2lora.serve.access import Access, Holder, is_loopback
from pf2lora.serve.bodies import Body, ChatBody, CompletionBody, PredictBody, Sampled, parsed
from pf2lora.serve.errors import ApiError, bad_request, gone_away, no_model, too_many, too_slow
from pf2lora.serve.log import RequestLog
from pf2lora.serve.replies import ChatReply, Reply
from pf2lora.serve.service import Service, Texts

DRAINED = 16  # times the largest body: so much of a larger one is read, so that its sender gets to hear of it

router = APIRouter()
B = TypeVar("B", bound=Body)
T = TypeVar("T")


def create_app(service: Service, access: Access, log: Callable[[str], None] | None = None) -> FastAPI:
    """The application; its worker starts and ends with it. `log` is told a line for each request."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.close)

    # No pages of documentation: FastAPI's load their scripts from elsewhere.
    app = FastAPI(title="pf2lora", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service, app.state.access = service, access
    app.include_router(router)
    app.add_middleware(Admission, most=service.limits.requests)
    if log is not None:
        app.add_middleware(RequestLog, tell=log)
    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, refused)
    return app


async def refused(request: Request, error: Exception) -> Response:
    """Every error in OpenAI's format; what was not foreseen is told to the caller without its details."""
    if isinstance(error, HTTPException):  # no such path, no such method
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed")
    return JSONResponse(error.body(), error.status, error.headers)


class Admission:
    """At most so many requests at once; /health is answered beside them."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most, self.inside = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if self.inside >= self.most:
            error = too_many()
            return await JSONResponse(error.body(), error.status, error.headers)(scope, receive, send)
        self.inside += 1
        try:
            return await self.app(scope, receive, send)
        finally:
            self.inside -= 1


# --- who asks, and what --------------------------------------------------------------------------------------


async def caller(request: Request) -> Holder:
    """Whose token the request brings. Without tokens, only pages and programs that call this machine by its own name:
    a web page whose name was made to point here is neither."""
    access: Access = request.app.state.access
    if not access.holders and not is_loopback(host_of(request)):
        raise ApiError(403, "without a token this server answers to localhost alone")
    holder = access.holder(request.headers.get("authorization"))
    if holder is None:
        raise ApiError(401, "no valid token: send 'Authorization: Bearer TOKEN'", code="invalid_api_key")
    request.state.holder = holder.name
    return holder


def host_of(request: Request) -> str:
    """By which name the caller calls this server."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:  # half an address of IPv6
        raise bad_request("the Host header is no address") from None


Caller = Annotated[Holder, Depends(caller)]


async def read(request: Request, kind: type[B], holder: Holder) -> B:
    """The request's body, for a model that there is and that the caller may use."""
    service: Service = request.app.state.service
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON: send 'Content-Type: application/json'")
    try:
        async with asyncio.timeout(service.limits.seconds):
            data = await whole_body(request, service.limits.body)
    except TimeoutError:
        raise too_slow(service.limits.seconds) from None
    except ClientDisconnect:
        raise gone_away() from None
    body = parsed(kind, data)
    if body.model not in service.adapters or not holder.may_use(body.model):
        raise no_model(body.model)
    request.state.model = body.model
    return body


async def whole_body(request: Request, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        elif size > most * DRAINED:
            break
    if size > most:
        raise ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")
    return b"".join(parts)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it ends when the caller goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] not in done:
            raise gone_away()
        result: T = tasks[0].result()
        return result
    finally:
        for task in tasks:
            task.cancel()


# --- endpoints -----------------------------------------------------------------------------------------------


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether models are being served; for whoever watches over processes, so without a token."""
    service: Service = request.app.state.service
    return JSONResponse({"status": "ok"}) if service.worker.alive else JSONResponse({"status": "down"}, 503)


@router.get("/v1/models")
async def models(request: Request, holder: Caller) -> Response:
    service: Service = request.app.state.service
    names = [name for name in service.adapters if holder.may_use(name)]
    return JSONResponse({"object": "list", "data": [described(service, name) for name in names]})


@router.get("/v1/models/{name}")
async def model(request: Request, name: str, holder: Caller) -> Response:
    service: Service = request.app.state.service
    if name not in service.adapters or not holder.may_use(name):
        raise no_model(name)
    return JSONResponse(described(service, name))


def described(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "pf2lora"}


@router.post("/v1/completions")
async def completions(request: Request, holder: Caller) -> Response:
    body = await read(request, CompletionBody, holder)
    texts = await request.app.state.service.completion(body, holder.name)
    return await written(request, body, texts, Reply(body.model, texts.jobs, body.n))


@router.post("/v1/chat/completions")
async def chat(request: Request, holder: Caller) -> Response:
    body = await read(request, ChatBody, holder)
    texts = await request.app.state.service.chat(body, holder.name)
    return await written(request, body, texts, ChatReply(body.model, texts.jobs, body.n))


async def written(request: Request, body: Sampled, texts: Texts, reply: Reply) -> Response:
    if not body.stream:
        try:
            return JSONResponse(await unless_gone(request, reply.whole(texts.pieces())))
        finally:
            texts.cancel()
    events = reply.events(texts.pieces(), with_usage=body.stream_options.include_usage)
    return Stream(texts, events)


class Stream(StreamingResponse):
    """Events, and an end to the writing wherever their sending ends: a caller may be gone before the first."""

    def __init__(self, texts: Texts, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.texts.cancel()


@router.post("/v1/predict")
async def predict(request: Request, holder: Caller) -> Response:
    body = await read(request, PredictBody, holder)
    found = await unless_gone(request, request.app.state.service.predict(body, holder.name))
    return JSONResponse({"object": "list", "model": body.model, "data": found})
