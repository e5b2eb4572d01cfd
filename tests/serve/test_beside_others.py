"""What is served beside what others make of the same adapters: PEFT, a chat template, TLS."""

from __future__ import annotations

import datetime
import json
import ssl
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from little_world import FAST, command_line
from peft import PeftModel
from serving import complete, serving
from tiny_tasks import FOODS, write_generation_task, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import pf2lora
from pf2lora.errors import UserError
from pf2lora.run.saved import load_run
from pf2lora.serve.server import check_tls
from pf2lora.tasks.generation.conversations import Conversation, Message
from pf2lora.tasks.generation.task import Generation

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_plain_peft_writes_what_is_served(
    generation_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The exported adapter is one LoRA of rank r + r̃; another server gets the prompt with the run's separator."""
    name = load_run(generation_run, device="cpu").config.model.name
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    for client in ("north", "west"):  # before there is a server: its thread shares this process's output
        args = ("export", generation_run, "--client", client, "--out", tmp_path / client)
        assert command_line(monkeypatch, capsys, *args)[0] == 0
    with serving(generation_run) as served:
        for client in ("north", "west"):
            out = tmp_path / client
            config = json.loads((out / "adapter_config.json").read_text())
            assert config["r"] == config["lora_alpha"] == 2 * (4 + 2) and not config["modules_to_save"]
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(name), out).eval()
            asked = tokenizer("soup<|endoftext|>", return_tensors="pt")
            with torch.no_grad():
                written = model.generate(**asked, max_new_tokens=9, do_sample=False, pad_token_id=1)
            text = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
            found = served.client().completions.create(
                model=client, prompt="soup", max_tokens=9, temperature=0
            )
            assert found.choices[0].text == text.lstrip()


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of conversations, with a template of its tokenizer's own that wants turns to alternate."""
    root = tmp_path_factory.mktemp("chats")
    model, _ = write_generation_task(root, ["unused"])
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    files = []
    for name in ("north", "south"):
        turns = [
            [{"role": "user", "content": food}, {"role": "assistant", "content": f"{food} {name}"}]
            for food in FOODS
        ]
        files.append(write_rows(root / "chats" / f"{name}.jsonl", [{"messages": turn} for turn in turns]))
    settings: dict[str, Any] = FAST | {"max_length": 96, "max_new_tokens": 0, "client_lr": 3.0, "lr": 0.03}
    clients = [str(file) for file in files]
    pf2lora.federate(model=str(model), clients=clients, task="generation", out=root / "run", **settings)
    return root / "run"


def test_a_run_of_conversations_answers_as_it_was_trained(chat_run: Path) -> None:
    loaded = load_run(chat_run, device="cpu")
    task = loaded.task
    assert isinstance(task, Generation)
    task.settings = replace(task.settings, beams=1, no_repeat_ngram=0, max_new_tokens=9)
    said = ("system", "be brief"), ("user", "soup?"), ("assistant", "yes"), ("user", "hot?")
    asked = Conversation(tuple(Message(*turn) for turn in said))
    with serving(chat_run) as served:
        chat: Any = served.client().chat.completions

        def answer(client: str, *turns: tuple[str, str]) -> str:
            messages = [{"role": role, "content": content} for role, content in turns]
            found = chat.create(model=client, messages=messages, temperature=0, max_tokens=9)
            return str(found.choices[0].message.content)

        for client in ("north", "south"):
            wanted = task.generate(loaded.model, *loaded.client(client), [[asked]])[0][0]
            assert answer(client, *said).strip() == wanted
            assert answer(client, ("user", "soup?")) == complete(served, client, "soup?")
        for bad, words in (
            ([("assistant", "a"), ("user", "b")], "must alternate"),
            ([("user", "a"), ("assistant", "b")], "one that the assistant can answer"),
            ([("user", " ")], "one that the assistant can answer"),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as error:
                answer("north", *bad)
            assert error.value.param == "messages"
        assert served.service.prompts is not None
        prompt = served.service.prompts.of_chat(asked.messages)
    text = "<user>be brief\n\nsoup?<assistant>yes<user>hot?<assistant>"
    assert task.tokenizer.decode(prompt) == text, "the template knows no system, and there is no separator"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed one for 127.0.0.1."""
    pytest.importorskip("cryptography")
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pf2lora")])
    now = datetime.datetime.now(datetime.UTC)
    place = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(place, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "server.crt", folder / "server.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files


def test_over_tls(generation_run: Path, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    check_tls(*files)
    with pytest.raises(UserError, match="are no certificate and its key"):
        check_tls(files[1], files[0])
    with serving(generation_run, tls=files) as served:
        assert served.address.startswith("https://")
        trusted = ssl.create_default_context(cafile=files[0])
        with urllib.request.urlopen(f"{served.address}/v1/models", context=trusted) as answer:
            assert len(json.load(answer)["data"]) == 5
