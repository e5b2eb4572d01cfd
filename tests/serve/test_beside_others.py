"""What is served beside what others make of the same adapters: PEFT, a chat template, TLS."""

from __future__ import annotations

import datetime
import json
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from little_world import command_line
from peft import PeftModel
from serving import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from pf2lora.errors import UserError
from pf2lora.run.saved import load_run
from pf2lora.serve.server import check_tls
from pf2lora.serve.writing import Prompts
from pf2lora.tasks.generation.task import Generation

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_plain_peft_writes_what_is_served(
    generation_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The exported adapter is one LoRA of rank r + r̃; another server gets the prompt with the run's separator."""
    name = load_run(generation_run, device="cpu").config.model.name
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    with serving(generation_run) as served:
        for client in ("north", "west"):
            out = tmp_path / client
            assert (
                command_line(monkeypatch, capsys, "export", generation_run, "--client", client, "--out", out)[
                    0
                ]
                == 0
            )
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


@pytest.fixture
def templated(generation_run: Path) -> Prompts:
    task = load_run(generation_run, device="cpu").task
    assert isinstance(task, Generation)
    task.tokenizer.chat_template = TEMPLATE
    return Prompts(task, longest=128)


def test_a_chat_goes_through_the_tokenizers_template(templated: Prompts) -> None:
    turns = [
        {"role": "user", "content": "soup?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "hot"},
    ]
    found = templated.tokenizer.decode(templated.of_chat(turns))
    assert found == "<user>soup?<assistant>yes<user>hot<assistant>", "and no separator of the run's"
    growing = templated.growing((), chat=True)
    assert growing.add(templated.tokenizer(" x")["input_ids"][0]) == " ", "its blanks are its own"


def test_what_a_template_refuses_is_a_bad_request(templated: Prompts, generation_run: Path) -> None:
    with pytest.raises(Exception, match="chat template refuses these messages: no system message") as error:
        templated.of_chat([{"role": "system", "content": "be brief"}])
    assert error.value.status == 400  # type: ignore[attr-defined]
    with serving(generation_run) as served:
        assert served.service.prompts is not None
        served.service.prompts.tokenizer.chat_template = TEMPLATE
        served.service.prompts.has_template = True
        chat = served.client().chat.completions
        with pytest.raises(openai.BadRequestError, match="no system message"):
            chat.create(model="north", messages=[{"role": "developer", "content": "be brief"}])
        assert chat.create(model="north", messages=[{"role": "user", "content": "hi"}], max_tokens=3).usage


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
