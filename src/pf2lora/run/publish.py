"""A run's adapter on the Hugging Face hub: the four files that others need, and nothing else of the run's folder."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pf2lora.adapters.peft import ADAPTER_CONFIG, BASE_CONFIG, WEIGHTS
from pf2lora.errors import UserError, one_line, reading, unknown
from pf2lora.methods import METHODS
from pf2lora.parsing import read_json, read_text
from pf2lora.run.cards import CARD, NO_LICENCE, public_base
from pf2lora.run.folder import place
from pf2lora.run.saved import read_config, read_description

LOCAL = ("_name_or_path", "base_model_name_or_path")  # may be a place on somebody's machine


def adapter_folder(run: Path, method: str | None, client: str | None) -> Path:
    """Where the adapter of a run is: a client's, or the common one."""
    config = read_config(run)
    asked = method or config.training.method[0]
    names = {METHODS[name].name: name for name in config.training.method}
    if asked not in (*names, *names.values()):
        raise unknown("method of this run", asked, list(names))
    where = place(run, config, METHODS[names.get(asked, asked)].name)
    known = read_description(where)
    if client is not None and client not in known.clients:
        raise UserError(f"{run} has no client {client!r}; its clients: {', '.join(known.clients)}")
    folder = where / "clients" / client if client and not known.shares_one_model else where / "common"
    for name in (ADAPTER_CONFIG, WEIGHTS, BASE_CONFIG, CARD):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}; an adapter is published with all its files")
    return folder


def files_to_publish(folder: Path, repo: str, base: str | None, licence: str | None) -> dict[str, bytes]:
    """What is uploaded, by name. A base model that is a folder here must be given the name that others know it by."""
    peft = read_json(folder / ADAPTER_CONFIG)
    named = base or public_base(str(peft.get("base_model_name_or_path") or ""))
    if not named:
        raise UserError(
            "the run's base model is a folder of this machine, where nobody else finds it: name it as it is called on "
            "the hub (--base FacebookAI/roberta-base)"
        )
    with reading(folder / WEIGHTS):
        weights = (folder / WEIGHTS).read_bytes()
    return {
        CARD: public_card(read_text(folder / CARD), repo, named, licence).encode(),
        ADAPTER_CONFIG: as_json(peft | {"base_model_name_or_path": named}),
        BASE_CONFIG: as_json({k: v for k, v in read_json(folder / BASE_CONFIG).items() if k not in LOCAL}),
        WEIGHTS: weights,
    }


def public_card(text: str, repo: str, base: str, licence: str | None) -> str:
    """The card with what is known now: the licence, the base model, and where the adapter is."""
    lines = [line for line in text.splitlines() if not line.startswith("base_model: ")]
    at = lines.index("library_name: peft")
    lines.insert(at + 1, f"base_model: {json.dumps(base)}")
    if licence is not None:
        lines = [f"license: {licence}" if line == f"license: {NO_LICENCE}" else line for line in lines]
        cut = lines.index("## Before it is published") if "## Before it is published" in lines else len(lines)
        lines = lines[:cut]
    swapped = {
        'folder = "."  # this folder': f'folder = "{repo}"',
        'base = "the base model"': f'base = "{base}"',
    }
    return "\n".join(swapped.get(line, line) for line in lines).rstrip() + "\n"


def as_json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def upload(files: dict[str, bytes], repo: str, *, public: bool) -> str:
    """Put the files into a repository of the hub, which is made if it is not there; its address is returned."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="pf2lora")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            address = hub.create_repo(repo, private=not public, exist_ok=True)
            hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="An adapter, by pf2lora")
        except Exception as error:  # the client's errors have changed their classes between its versions
            raise UserError(f"the hub did not take {repo!r}: {why(error)}") from error
    return str(address)


def why(error: Exception) -> str:
    """What to do about it, as far as its kind tells."""
    answer = getattr(getattr(error, "response", None), "status_code", None)
    if answer in (401, 403) or type(error).__name__ == "LocalTokenNotFoundError":
        return "not logged in, or no right to write there ('hf auth login', or HF_TOKEN)"
    if answer is None and isinstance(error, ValueError):  # a name that cannot be one
        return one_line(error)
    if answer is None:
        return f"it cannot be reached ({type(error).__name__}); nothing was published"
    return f"it answered {answer}: {one_line(error)}"
