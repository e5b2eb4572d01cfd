"""A run that was interrupted: whether there is anything left to do, and how to go on, said in one line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pf2lora import folder_lock
from pf2lora.core.failures import ran_out
from pf2lora.engines.processes import Processes, ProcessLost
from pf2lora.errors import CannotWrite, UserError
from pf2lora.methods import METHODS
from pf2lora.run import checkpoints, folder, snapshot
from pf2lora.run.checkpoints import Checkpoints
from pf2lora.run.config import Config, difference, from_toml, to_dict
from pf2lora.run.fingerprint import CannotGoOn
from pf2lora.run.interruption import Interrupted
from pf2lora.run.launch import command_prefix
from pf2lora.run.result import FILE, Result, from_json, load_result


def command(config: Config, out: Path) -> str:
    """What goes on with the run: its own config has every setting."""
    name = "train" if len(config.training.method) == 1 else "compare"
    place = "" if config.output.out == str(out) else f"--out {shlex.quote(str(out))} "
    return f"{command_prefix()}pf2lora {name} {shlex.quote(str(out / 'config.toml'))} {place}--resume"


def ended(config: Config, out: Path, *, force: bool = False) -> Result | None:
    """The result of a run that has ended; None where there is something to do, or nothing was begun. CannotGoOn where
    `out` holds a run of other settings without checkpoints."""
    if force:
        raise UserError("--force starts anew and --resume goes on: give one of them")
    if not folder.run_files(out) or any(snapshot.newest_first(out / checkpoints.FOLDER)):
        return None
    result = load_result(out) if (out / FILE).exists() else None
    begun = result.config if result else to_dict(from_toml(out / "config.toml"))
    if other := difference(begun, to_dict(config)):
        raise CannotGoOn(
            f"the run in {str(out)!r} has no checkpoints, and is of other settings ({other}); --force or another --out "
            f"starts anew"
        )
    names = {METHODS[name].name for name in config.training.method}
    if result and names != set(result.methods):
        left = ", ".join(names - set(result.methods))
        raise CannotGoOn(
            f"the run in {str(out)!r} has no checkpoints, and has not finished {left}; --force or another --out starts "
            f"anew"
        )
    if result:  # it may have been killed while it cleared up
        checkpoints.remove_all(out / checkpoints.FOLDER)
    return result


def ended_for_all(
    processes: Processes, config: Config, out: Path, *, force: bool, resume: bool
) -> Result | None:
    """The same for all processes of a run, of which the first looks; and whether `out` may be written."""
    result: Result | None = None
    with processes.together():
        if processes.first:
            result = ended(config, out, force=force) if resume else None
            if result is None:
                folder_lock.check_unused(out)
                if not resume:
                    folder.check_free(out, force=force)
    if processes.alone:
        return result
    told = processes.from_first(lambda: None if result is None else result.to_dict())
    return None if told is None else from_json(told, str(out))


def begun(keeper: Checkpoints) -> bool:
    """Whether there is a checkpoint to go on from, and that is where the run stands now."""
    try:
        return keeper.load()
    except CannotGoOn as error:
        raise CannotGoOn(f"{error}; --force or another --out starts anew") from None


@contextmanager
def saying_how(again: str, keeper: Checkpoints) -> Iterator[None]:
    """Signals end a round first; and whatever else stops a run, memory, disk or a second Ctrl-C, is one line that says
    how to go on."""
    try:
        with keeper.interruption.listening():
            yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise keeper.stopped("stopped at once") from None
    except ProcessLost as error:
        kept = f"round {keeper.round} is kept" if keeper.round else "no round of this method is kept"
        raise ProcessLost(f"{error}; {kept}; go on with: {again}") from None
    except OSError as error:
        refused = (
            error if isinstance(error, CannotWrite) else CannotWrite(error.filename or keeper.folder, error)
        )
        refused.line += f"; then go on with: {again}"
        raise refused from None
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        line = (str(error).splitlines() or ["no memory"])[0]
        raise UserError(
            f"out of memory ({line}); --clients-per-pass needs less; go on with: {again}"
        ) from None
