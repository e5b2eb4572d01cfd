"""`pf2lora federation`: the same methods across machines, on NVIDIA FLARE."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pf2lora.cli.federation_doctor import doctor
from pf2lora.cli.federation_join import KitFolder, join, leave, tell
from pf2lora.cli.federation_keys import authority, kit_of_signed, readmit, remove, request, sign
from pf2lora.cli.federation_site import approve, read_limits, verify
from pf2lora.cli.federation_watch import LeadKit, status, watch
from pf2lora.cli.options import WRITTEN, ListCommand, configured, read_config
from pf2lora.errors import UserError
from pf2lora.federation.engine import engine

app = typer.Typer(help="Federate across machines (NVIDIA FLARE).", no_args_is_help=True)

RULES = "Timeouts and update checks"
Deadline = Annotated[
    float, typer.Option("--deadline", help="Seconds a round waits for its sites.", rich_help_panel=RULES)
]
FinalDeadline = Annotated[
    float,
    typer.Option(
        "--final-deadline", help="Seconds for the last scores, where text is written.", rich_help_panel=RULES
    ),
]
Quorum = Annotated[
    float,
    typer.Option("--quorum", help="Fraction of a round's sites that must answer.", rich_help_panel=RULES),
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait", help="Seconds that a run below its quorum waits for sites.", rich_help_panel=RULES
    ),
]
NormLimit = Annotated[
    float,
    typer.Option(
        "--norm-limit", help="Refuse updates with a norm beyond so many medians.", rich_help_panel=RULES
    ),
]
Wire = Annotated[
    str,
    typer.Option("--wire", help="Precision of the common adapter on the network: float32, bfloat16 or int8."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check the plan and say what it would cost, in bytes and privacy; start nothing."
    ),
]
Masked = Annotated[
    bool, typer.Option("--masked", help="Sites mask their updates: the server sees only a round's sum.")
]
Merge = Annotated[
    str,
    typer.Option(
        "--merge", help="How updates become one: mean, median or trimmed (mean).", rich_help_panel=RULES
    ),
]


@app.callback()
def federation() -> None:
    """Federate across machines (NVIDIA FLARE)."""


@configured
def rehearse(
    settings: dict[str, Any],
    file: Path | None,
    sites: Annotated[
        int | None, typer.Option("--sites", help="Number of sites (4 with the embedded data).")
    ] = None,
    deadline: Deadline = 600.0,
    final_deadline: FinalDeadline = 3600.0,
    quorum: Quorum = 0.5,
    wait: Wait = 3600.0,
    norm_limit: NormLimit = 10.0,
    wire: Wire = "float32",
    masked: Masked = False,
    merge: Merge = "mean",
    out: Annotated[Path, typer.Option("--out", help="The run folder to write.", **WRITTEN)] = Path(
        "runs/federation"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")] = False,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="A policy.toml that every site has (default: its defaults)."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="Processes with which each site computes a batch."),
    ] = 1,
    dry_run: DryRun = False,
) -> None:
    """Try a whole federation on this machine: authority, server and one process per site, with mutual TLS."""
    from pf2lora.cli.show import quiet_libraries, show_result

    run = engine().rehearse
    quiet_libraries()
    limits = read_limits(policy)
    config = with_sites(rehearsal_config(settings, file, sites), sites)
    options = {
        "deadline": deadline,
        "final_deadline": final_deadline,
        "quorum": quorum,
        "wait": wait,
        "norm_limit": norm_limit,
        "wire": wire,
        "masked": masked,
        "merge": merge,
    }
    if dry_run:
        from pf2lora.cli.federation_dry_run import show_rehearsal

        show_rehearsal(config, options)
        return
    try:
        result = run(config, out, options=options, force=force, tell=tell, policy=limits, per_site=processes)
    except KeyboardInterrupt:
        sys.exit(130)
    if sites is not None and len(result.clients) != sites:
        tell(f"the data makes {len(result.clients)} sites, whatever --sites says")
    show_result(result, out)


app.command(cls=ListCommand)(rehearse)


def rehearsal_config(settings: dict[str, Any], file: Path | None, sites: int | None) -> Any:
    """What was asked for; the embedded text and model where no data is named."""
    from pf2lora.data.settings import DataSettings
    from pf2lora.settings import settings_of

    if file is not None or "model" in settings or settings_of(DataSettings).keys() & settings.keys():
        return read_config(settings, file)
    from pf2lora.cli.demo import demo_config
    from pf2lora.run.config import from_dict, in_tables, merged, to_dict

    smaller = {
        "method": ["pf2lora"],
        "rounds": 6,
        "evaluate_every": 6,
        "num_clients": sites or 4,
        "limit": 400,
    }
    smaller["title"] = "A rehearsal: Rotten Tomatoes sentences"
    over = in_tables(smaller | settings, "command line")
    return from_dict(merged(to_dict(demo_config()), over), "command line")


def with_sites(config: Any, sites: int | None) -> Any:
    """The config for so many sites, where the data is shared out by a rule."""
    import dataclasses

    if sites is None:
        return config
    if sites < 1:
        raise UserError(f"--sites is {sites}; a federation needs at least one")
    if config.data.dataset is not None or config.data.partition is not None:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, num_clients=sites))
    return config


@app.command()
def provision(
    project: Annotated[Path, typer.Argument(help="project.toml: name, host, port, sites.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the kits.", **WRITTEN)] = Path("kits"),
) -> None:
    """Make everybody's kits and keys in one place: for rehearsals, or where one organisation has all machines.

    Who runs this can be any site. Otherwise each key is made where it lives: `authority`, `request`, `sign`, `kit`.
    """
    made = engine().make_kits(project, out)
    for name, folder in made.items():
        typer.echo(f"{name}: {folder}")
    typer.echo(f"the authority's key is in {out / 'authority'}: keep it where no participant can read it")
    typer.echo(
        "all private keys were made here, so whoever was here can be any site: between organisations use `authority`, "
        "`request`, `sign` and `kit` instead"
    )


@configured
def submit(
    settings: dict[str, Any],
    file: Path | None,
    kit: LeadKit,
    sites: Annotated[str, typer.Option("--sites", help="The sites' names: a,b,c.")],
    labels: Annotated[str, typer.Option("--labels", help="Every label of the federation: neg,pos.")] = "",
    name: Annotated[str, typer.Option("--name", help="The run's name; the same name resumes.")] = "run",
    deadline: Deadline = 600.0,
    final_deadline: FinalDeadline = 3600.0,
    quorum: Quorum = 0.5,
    wait: Wait = 3600.0,
    norm_limit: NormLimit = 10.0,
    wire: Wire = "float32",
    masked: Masked = False,
    merge: Merge = "mean",
    dry_run: DryRun = False,
) -> None:
    """Hand a run to the server. The same command resumes one that was stopped."""
    from pf2lora.federation.protocol.plan import Plan
    from pf2lora.federation.protocol.submitted import remember

    config = read_config(settings, file)
    plan = Plan.of(
        config,
        name,
        tuple(sites.split(",")),
        tuple(labels.split(",") if labels else ()),
        deadline=deadline,
        final_deadline=final_deadline,
        quorum=quorum,
        wait=wait,
        norm_limit=norm_limit,
        wire=wire,
        masked=masked,
        merge=merge,
    )
    if dry_run:
        from pf2lora.cli.federation_dry_run import show_submission

        if not kit.is_dir():
            raise UserError(f"{kit}: there is no such kit; `pf2lora federation provision` makes them")
        show_submission(plan, config)
        return
    job = engine().submit(kit, plan)
    if config.model.name:
        remember(kit, name, config.model.name)
    typer.echo(f"run {name!r} is job {job}: deadline {deadline:g} s a round, quorum {quorum:g}")


app.command(cls=ListCommand)(submit)
for one in (join, leave, approve, verify, doctor, status, watch):
    app.command()(one)
for made_where_it_lives in (authority, request, sign, kit_of_signed, remove, readmit):
    app.command(name="kit" if made_where_it_lives is kit_of_signed else None)(made_where_it_lives)


@app.command()
def stop(kit: LeadKit, name: Annotated[str, typer.Argument(help="The run's name.")]) -> None:
    """Stop a run; `resume` goes on with it."""
    ids = engine().stop_run(kit, name)
    if not ids:
        raise UserError(f"no run {name!r} is going on")
    typer.echo(f"run {name!r} is stopped")


@app.command()
def resume(kit: LeadKit, name: Annotated[str, typer.Argument(help="The run's name.")]) -> None:
    """Go on with a run that was stopped or lost its quorum, as it was submitted."""
    job = engine().resume_run(kit, name)
    typer.echo(f"run {name!r} goes on as job {job}")


@app.command("keep-newest")
def keep_newest(kit: KitFolder, name: Annotated[str, typer.Argument(help="The run's name.")]) -> None:
    """At a site whose server was restored from an older backup: go on with the site's newest adapter."""
    from pf2lora.federation.protocol.checkpoints import CheckpointFolder
    from pf2lora.federation.protocol.names import check_name
    from pf2lora.federation.protocol.site_setup import SITE_FILE, read_site_file

    check_name("run", name)
    file = kit / "local" / SITE_FILE
    number = CheckpointFolder(file.parent / read_site_file(file).state / name, name).keep_newest()
    typer.echo(f"{name}: the site goes on with its adapter of round {number} when it joins again")


@app.command()
def fetch(
    kit: LeadKit,
    name: Annotated[str, typer.Argument(help="The run's name.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="The base model: a folder or a hub name (default: what the run was submitted with).",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder to write (default: runs/NAME).")
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="The sites' rows are pairs of texts, which no site has told.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")] = False,
) -> None:
    """Get a finished run: the common adapter for PEFT and `predict`, result.json, report.html."""
    import tempfile

    from pf2lora.cli.show import quiet_libraries, show_result
    from pf2lora.federation.protocol.fetched import build
    from pf2lora.federation.protocol.submitted import model_of

    base = model or model_of(kit, name)
    quiet_libraries()
    where = out or Path("runs") / name
    with tempfile.TemporaryDirectory() as scratch:
        traits = ["pairs"] if pairs else []
        result = build(engine().fetch(kit, name, Path(scratch)), where, base, force=force, traits=traits)
    show_result(result, where)
