"""`pf2lora serve`: a run's models over HTTP, by OpenAI's API."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pf2lora.cli.use import Device, Method, Model, Run, open_run
from pf2lora.errors import UserError, listed, missing_extra, one_line

if TYPE_CHECKING:
    from pf2lora.serve.service import Service

TOKEN = "PF2LORA_SERVE_TOKEN"


def serve(
    run: Run,
    host: Annotated[
        str,
        typer.Option("--host", help="The address to listen on; others than this machine's own want a token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help=f"A file with the token that callers must send (or ${TOKEN})."),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", help="A TOML file: a token for each holder, with the models that it opens."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="A certificate (PEM): https.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The certificate's key (PEM).")] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Requests that share a pass, whosever they are.")
    ] = 16,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Requests that may wait; more are told to come back.")
    ] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            min=2,
            help="Longest prompt and answer in tokens (default: the model's, at most 4096).",
        ),
    ] = None,
    max_body: Annotated[int, typer.Option("--max-body", min=1, help="Largest request in KiB.")] = 1024,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Longest request in seconds.")] = 120,
    method: Method = None,
    device: Device = "auto",
    model: Model = None,
) -> None:
    """Serve every client's model of a run by its name, on one base model, with OpenAI's API over HTTP."""
    from pf2lora.run.config import config_file
    from pf2lora.serve.access import Access, is_loopback, one_token, read_token_file, read_tokens

    config_file(run)  # a wrong folder is said before torch is loaded
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_extra(str(error.name), "serve", "'pf2lora serve'") from None
    given = [name for name, it in (("--token-file", token_file), ("--tokens", tokens)) if it is not None]
    if len(given) > 1:
        raise UserError("give --token-file or --tokens, not both")
    if not given and not os.environ.get(TOKEN) and not is_loopback(host):
        raise UserError(
            f"--host {host} lets others in: give --token-file, --tokens or ${TOKEN}, or stay at 127.0.0.1"
        )
    if (tls_cert is None) != (tls_key is None):
        raise UserError("--tls-cert and --tls-key belong together: give both")
    access = Access()
    if token_file is not None:
        access = read_token_file(token_file)
    elif tokens is not None:
        read_tokens(tokens)  # what is wrong with it is said before anything is loaded
    elif token := os.environ.get(TOKEN):
        access = one_token(token, f"${TOKEN}")
    from pf2lora.serve.server import address_of, check_tls, listen, make_server

    if tls_cert is not None and tls_key is not None:
        check_tls(tls_cert, tls_key)
    socket = listen(host, port)
    loaded = open_run(run, method, device, model)
    from pf2lora.serve.app import create_app
    from pf2lora.serve.service import Limits, Service

    share = None if tokens is None else (queue + 1) // 2  # nobody can fill the line alone
    limits = Limits(batch, queue, share, max_body * 1024, length=max_length, seconds=timeout)
    service = Service(loaded, limits)
    if tokens is not None:
        access = read_tokens(tokens, list(service.adapters), service.for_all)
    for line in introduced(service):
        typer.echo(one_line(line), err=True)
    app = create_app(service, access, lambda line: typer.echo(line, err=True))
    server = make_server(app, limits, tls_cert, tls_key)
    socket.listen()  # from here on callers are heard, so the address can be told
    typer.echo(address_of(socket, host, tls=tls_cert is not None))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # once what runs is done, both end it alike
    with suppress(KeyboardInterrupt):  # which may come out of it, or end it
        server.run(sockets=[socket])
    typer.echo("stopped", err=True)


def introduced(service: Service) -> list[str]:
    """What is served, and what a caller might not expect."""
    lines = [f"models: {listed(service.adapters)}"]
    for name in service.for_all:
        if name.startswith(":"):
            lines.append(f"{name[1:]} is a client's; the {name[1:]} model of the run is {name}")
    elsewhere = [name for name in service.loaded.saved.clients if name not in service.adapters]
    if elsewhere:
        lines.append(f"not served, as their adapters are not in this folder: {listed(elsewhere)}")
    if service.prompts is None:
        return [*lines, f"a run of {service.loaded.task.name}: POST /v1/predict"]
    lines.append(f"prompt and answer have at most {service.prompts.longest} tokens")
    if not service.prompts.of_conversations:
        lines.append(
            "a run of prompts: a chat's messages are taken as one (a run of conversations has a template)"
        )
    return [*lines, *service.loaded.task.notes]
