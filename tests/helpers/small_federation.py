"""A federation small enough for tests: a tiny BERT in a folder, four sites' files, and the run without FLARE."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from pf2lora.core.method import State
from pf2lora.engines.local import train
from pf2lora.federation.protocol.allow_list import AllowList, read_request
from pf2lora.federation.protocol.checkpoints import CheckpointFolder
from pf2lora.federation.protocol.masked import Take, ask
from pf2lora.federation.protocol.plan import Plan
from pf2lora.federation.protocol.policy import POLICY_FILE, Policy, to_toml
from pf2lora.federation.protocol.records import RoundRecord
from pf2lora.federation.protocol.server import ServerSession
from pf2lora.federation.protocol.site import SiteSession
from pf2lora.federation.protocol.site_setup import SiteSetup, build, state_folder
from pf2lora.federation.protocol.wire import Wire
from pf2lora.methods import SETS
from pf2lora.run.comparison import prepare
from pf2lora.run.config import from_dict, from_settings, in_tables, merged
from pf2lora.run.rounds import evaluation_rounds
from pf2lora.run.set_up import Trial, set_up
from pf2lora.run.trial import Outcome, run
from pf2lora.run.validation import SampledJudges

SITES = ("site-1", "site-2", "site-3", "site-4")
LABELS = ("neg", "pos")
WORDS = [f"w{i}" for i in range(45)]


def write_model(folder: Path, seed: int = 0, width: int = 16) -> Path:
    """A random BERT of two layers with its tokenizer, as save_pretrained() leaves it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 40,
        "num_labels": 2,
    }
    model = BertForSequenceClassification(BertConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)  # larger than usual, so that every step shows
    model.save_pretrained(folder)
    return folder


def write_data(folder: Path, sites: tuple[str, ...] = SITES) -> None:
    """Each site's train, test and validation file; sizes and label shares differ."""
    others, of_validation = random.Random(0), random.Random(1)
    for k, site in enumerate(sites):
        for part, rows in (("train", 40 + 10 * k), ("test", 20), ("validation", 12 + k)):
            draw = of_validation if part == "validation" else others
            (folder / part).mkdir(parents=True, exist_ok=True)
            with (folder / part / f"{site}.jsonl").open("w") as file:
                for _ in range(rows):
                    positive = draw.random() < 0.3 + 0.15 * k
                    words = draw.choices(WORDS[20:] if positive else WORDS[:25], k=draw.randint(4, 12))
                    file.write(json.dumps({"text": " ".join(words), "label": LABELS[positive]}) + "\n")


def write_site_file(
    path: Path,
    root: Path,
    site: str,
    model: Path | None = None,
    state: Path | None = None,
    client: str | None = None,
) -> Path:
    """The file a site says where its things are in; `client` is its client's name, where it has another."""
    name, rows = f'name = "{client}"\n' if client else "", client or site
    validation = root / "validation" / f"{rows}.jsonl"
    more = f'validation = ["{validation}"]\n' if validation.exists() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{name}model = "{model or root / "model"}"\nstate = "{state or root / "state" / site}"\ndevice = "cpu"\n'
        f'[data]\nclients = ["{root / "train" / rows}.jsonl"]\ntest = ["{root / "test" / rows}.jsonl"]\n{more}',
        encoding="utf8",
    )
    write_policy(path.parent)
    return path


def write_policy(folder: Path) -> None:
    """The batches of the local engine, whose numbers are compared; the limits are tests of their own."""
    own = Policy(min_batch_size=1, min_steps=1, min_rows=1, public_batch_order=True)
    (folder / POLICY_FILE).write_text(to_toml(own), encoding="utf8")


def settings(**changes: Any) -> dict[str, Any]:
    """A short run's settings, with one round alone at its end; the default is as many as the run itself has."""
    return {
        "rounds": 3,
        "steps": 2,
        "batch_size": 4,
        "rank": 4,
        "client_rank": 2,
        "lr": 0.01,
        "client_lr": 0.05,
        "personal_steps": 2,
    } | changes


def make_plan(method: str = "pf2lora", sites: tuple[str, ...] = SITES, **changes: Any) -> Plan:
    """A plan; `config` changes the run's settings."""
    own = {"methods": {name: {"finetune_steps": 3} for name in ("homlora-ft", "feddpa-f")}}
    config = from_settings(own | settings(**changes.pop("config", {})) | {"method": [method]})
    return Plan.of(config, "trial", sites, changes.pop("labels", LABELS), **changes)


def changed(plan: Plan, **settings: Any) -> Plan:
    """The plan with other settings of its run."""
    return replace(plan, config=merged(plan.config, in_tables(settings, "test")))


@dataclass
class Small:
    """The server's session and the sites' in one process. Every message passes the wire format and the allow-list."""

    plan: Plan
    root: Path
    files: dict[str, Path]
    setups: dict[str, SiteSetup] = field(default_factory=dict)
    tamper: Callable[[str, bytes], bytes] = lambda site, data: data
    messages: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for site, file in self.files.items():
            self.setups[site] = build(self.plan, file, site)
        self.start_server()
        self.sessions = {site: self.start_site(site) for site in self.files}

    def start_server(self) -> None:
        """A server, from what is on its disk."""
        self.coordinator = ServerSession(self.plan, self.root / "server")

    def start_site(self, site: str) -> SiteSession:
        """A site, from what is on its disk."""
        folder = CheckpointFolder(state_folder(self.plan, self.files[site]), self.plan.name)
        folder.open()
        return SiteSession(self.setups[site], folder, self.plan.run.training.steps, Wire.of(self.plan))

    def ask(self, requests: dict[str, bytes]) -> dict[str, bytes]:
        """The sites' answers, as far as their allow-lists let them out."""
        answers = {}
        for site, request in requests.items():
            setup = self.setups[site]
            answer = self.sessions[site].answer(read_request(request))
            AllowList(setup.method, setup.metrics, Wire.of(self.plan)).check(answer)
            self.messages.append((site, answer))
            answers[site] = self.tamper(site, answer)
        return answers

    def exchange(
        self, step: str, requests: Mapping[str, bytes], /, *, take: Take = lambda site, data: data
    ) -> dict[str, object]:
        return {site: take(site, data) for site, data in self.ask(dict(requests)).items()}

    def greet(self) -> None:
        for site, answer in self.ask(dict.fromkeys(self.files, self.coordinator.hello())).items():
            self.coordinator.register(site, answer)

    def round(self, present: list[str] | None = None) -> RoundRecord:
        """One round; `present` are those who answer."""
        there = list(self.files) if present is None else present
        measured = evaluation_rounds(self.plan.run.training)
        kit = next(iter(self.files.values())).parent.parent  # any has the authority's certificate
        answers, summed = ask(self.coordinator, there, measured, self.exchange, kit / "startup")
        missing = [s for s in self.coordinator.chosen(self.coordinator.done + 1) if s not in answers]
        return self.coordinator.finish_round(answers, 0.0, missing, summed)

    def run(self) -> None:
        self.greet()
        while not self.coordinator.over:
            self.round()
        self.coordinator.finish(self.ask(self.coordinator.finish_requests(list(self.files))))


def make_small(root: Path, plan: Plan, policies: Mapping[str, str] | None = None, **changes: Any) -> Small:
    """The sites' files under `root`, and the federation on them; `policies` are policy.toml files of some sites."""
    if not (root / "model").exists():
        write_model(root / "model")
        write_data(root)
    files = {site: write_site_file(root / "sites" / site / "site.toml", root, site) for site in plan.sites}
    for site, text in (policies or {}).items():
        files[site].with_name(POLICY_FILE).write_text(text, encoding="utf8")
    return Small(plan, root, files, **changes)


def local_trial(
    root: Path, plan: Plan, parts: tuple[str, ...] = ("test", "validation"), **more: Any
) -> Trial:
    """The same run for the local engine, on the same files; of `parts` that are not named, shares of the others."""
    data = {"clients": [str(root / "train")]} | {part: [str(root / part)] for part in parts} | more
    own = {"model": {"name": str(root / "model"), "device": "cpu"}, "data": data}
    config = from_dict(merged(plan.config, own), "test")
    return set_up(prepare(config), plan.method, config.training.seed)


def local_outcome(root: Path, plan: Plan) -> tuple[Outcome, Trial]:
    """What comes out of a whole local run, with what each client deploys."""
    trial = local_trial(root, plan)
    (found,) = run(trial, lambda seed, record: None)
    return found, trial


def local_run(root: Path, plan: Plan, *parts: str) -> tuple[State, torch.Tensor, Trial]:
    """The local engine's last state, its common x and its trial."""
    trial = local_trial(root, plan, *([parts] if parts else []))
    judges = SampledJudges(trial)
    *_, last = train(trial.method, trial.F, trial.state, trial.source, trial.schedule, judges=judges)
    return last.served, last.common[0], trial


def in_time(method: str) -> tuple[pytest.MarkDecorator, ...]:
    """The paper's methods, and some of each other kind, in `make test`; all of them in `make test-all`."""
    kinds = ("ditto", "flexlora", "rolora", "fedadam", "scaffold", "fedsa-lora", "fedex-lora")
    return () if method in (*SETS["paper"], *kinds) else (pytest.mark.slow,)
