"""Loading a base model: a hub name or a folder, and one clear line when it cannot be had."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from pf2lora.adapters.architectures import HEADS
from pf2lora.adapters.prequantised import check_quantised, converted, quantised_by
from pf2lora.errors import UserError, nearest

WEIGHTS = ("*.safetensors",)  # never pickled ones (pytorch_model.bin)
SAMPLED = 1024  # numbers of a tensor whose places count, beside the sum of all of them
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")


def check_reachable(name: str) -> None:
    """A folder must hold a model; anything else is taken for a hub name."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"the model folder {name!r} has no config.json; save_pretrained() writes one")
        if not any(next(folder.glob(pattern), None) for pattern in WEIGHTS):
            raise UserError(f"the model folder {name!r} has no weights (model.safetensors)")
    elif folder.is_absolute() or name.startswith(".") or name.count("/") > 1 or begins_with_a_folder(name):
        beside = [str(p) for p in folder.parent.glob("*") if p.is_dir()] if folder.parent.is_dir() else []
        raise UserError(
            f"there is no model folder {name!r}{nearest(name, beside)}; give a folder or a hub name such as "
            f"'roberta-base'"
        )


def begins_with_a_folder(name: str) -> bool:
    """Whether `models/minlm` begins with a folder that is here: then it is a mistyped path, and no hub name."""
    first, _, rest = name.partition("/")
    return bool(rest) and Path(first).is_dir()


def load(kind: Any, name: str, **options: Any) -> Any:
    """`kind.from_pretrained(name)` with the hub's and the folder's failures in one line."""
    check_reachable(name)
    is_folder = Path(name).is_dir()
    try:
        with quiet():
            return kind.from_pretrained(name, local_files_only=is_folder or not hub_answers(), **options)
    except (OSError, ValueError, SafetensorError) as error:
        if is_folder or not isinstance(error, OSError):
            what = "model folder" if is_folder else "model"
            raise UserError(
                f"the {what} {name!r} cannot be loaded: {' '.join(str(error).split())}"
            ) from error
        raise UserError(
            f"the model {name!r} could not be fetched from the Hugging Face hub (no network, no such model, or no "
            f"access to it); where there is no hub, give a folder that save_pretrained() wrote"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Meanwhile transformers neither draws bars nor reports which weights a checkpoint lacks: that a head is new is no
    news to anybody who trains one."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached. Asked once: its own client would ask for a minute, file by file."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # the client's errors have changed their classes between its versions
        return False
    return True


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer; one without a padding token gets its end-of-text token for it."""
    check_reachable(name)
    folder = Path(name)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        raise UserError(
            f"the model folder {name!r} has no tokenizer (tokenizer.json); save_pretrained() writes one"
        )
    tokenizer: PreTrainedTokenizerBase = load(AutoTokenizer, name)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {name!r} has neither a padding nor an end-of-text token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(auto_class: Any, name: str, dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    """The base model in `dtype`; `config` overrides entries of its configuration (labels, padding token).

    It remembers which parameters the checkpoint did not hold: a new head is initialised anew for every seed.
    """
    settings = load(AutoConfig, name, **config)
    check_quantised(name, settings)
    options = {
        "config": settings,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "use_safetensors": True,  # pickled weights can hold code
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what the checkpoint lacks and nobody trains is the same wherever it is loaded
        model, info = load(auto_class, name, **options)
    mismatched = {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]}
    for parameter in sorted(
        mismatched
    ):  # a head for other labels is replaced; anything else would be random weights
        if parameter.split(".")[0] not in HEADS:
            raise UserError(f"the model {name!r}: its weights do not fit its config.json at {parameter!r}")
    if quantised_by(settings) is not None:
        converted(name, model, dtype)
    setattr(model, FRESH, frozenset(info["missing_keys"]) | mismatched)
    return cast(PreTrainedModel, model)


FRESH = "parameters_not_in_checkpoint"


def fresh_parameters(model: PreTrainedModel) -> frozenset[str]:
    """The names of the parameters that no checkpoint gave."""
    return getattr(model, FRESH, frozenset())


def weights_digest(model: PreTrainedModel) -> str:
    """Of every tensor the sum of its numbers read as integers, which a change of any one shows, and some numbers in
    their places. It is to notice another model, and costs little beside loading it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        bits = tensor.detach().reshape(-1)
        bits = bits.view(integers[bits.element_size()]) if bits.dtype != torch.bool else bits.to(torch.uint8)
        some = bits[:: max(1, len(bits) // SAMPLED)].cpu().numpy().tobytes()
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {total} ".encode() + some)
    return digest.hexdigest()
