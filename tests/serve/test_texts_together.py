"""Texts of different clients in one pass are what each client writes alone; and how their tokens become text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import NAMES
from tiny_tasks import byte_tokenizer
from tiny_text_models import causal
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, PreTrainedModel

from pf2lora.adapters.two_level import AdapterSpec, TwoLevelModel
from pf2lora.run.saved import LoadedRun, load_run
from pf2lora.serve.batch import Row, RunningBatch
from pf2lora.serve.models import served_models
from pf2lora.serve.prompts import Prompts
from pf2lora.serve.text import GrowingText
from pf2lora.serve.writing import Piece, TextJob, Writer
from pf2lora.tasks.generation.sampling import BROKEN, Sampler, choose
from pf2lora.tasks.generation.task import Generation

WINDOW: dict[str, Any] = {  # of fewer tokens than the texts have
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
    "sliding_window": 4,
}
WINDOWED = {
    "mistral": MistralConfig(**WINDOW),
    "gemma2": Gemma2Config(**WINDOW, query_pre_attn_scalar=8),
}
PROMPTS = {"north": [5, 6, 7, 8], "south": [9], "west": [3, 1, 4, 1, 5, 9, 2, 6]}
Adapters = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral", "gemma2"])
def models(request: Any) -> tuple[TwoLevelModel, Adapters]:
    """In float64, where only a mistake makes a difference; but Gemma's attention has a softmax in float32."""
    dtype = torch.float32 if request.param == "gemma2" else torch.float64
    if request.param in WINDOWED:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(WINDOWED[request.param])
        with torch.no_grad():
            for parameter in base.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        base.to(dtype)
    else:
        base = causal(request.param, dtype)
    return adapted(base, dtype)


def adapted(base: PreTrainedModel, dtype: torch.dtype) -> tuple[TwoLevelModel, Adapters]:
    """The model with three clients' random adapters."""
    model = TwoLevelModel(base, AdapterSpec(scaling=1.5, client_scaling=0.7))
    random = torch.Generator().manual_seed(1)
    layouts = model.common_layout, model.personal_layout

    def pair() -> tuple[Tensor, Tensor]:
        one, two = (0.1 * torch.randn(1, each.size, dtype=dtype, generator=random) for each in layouts)
        return one, two

    return model, {name: pair() for name in PROMPTS}


def alone(model: TwoLevelModel, adapters: Adapters, name: str, count: int) -> list[int]:
    """The likeliest tokens, each by a pass over the whole text, as in training."""
    ids = torch.tensor([PROMPTS[name]])
    for _ in range(count):
        with torch.no_grad():
            following = model(*adapters[name], input_ids=ids).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], dim=1)
    return ids[0, len(PROMPTS[name]) :].tolist()


def test_rows_that_come_and_go_write_what_each_writes_alone(models: tuple[TwoLevelModel, Adapters]) -> None:
    model, adapters = models
    wanted = {name: alone(model, adapters, name, 12) for name in PROMPTS}
    assert len({tuple(found) for found in wanted.values()}) == 3
    batch = RunningBatch(model, adapters.__getitem__, padding=0)
    rows = {name: Row(name, prompt, Sampler(0)) for name, prompt in PROMPTS.items()}
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def note(*names: str) -> None:
        for name in names:
            found[name].append(rows[name].last)

    batch.admit([rows["north"], rows["south"]])
    note("north", "south")
    for _ in range(3):
        batch.step()
        note("north", "south")
    batch.admit([rows["west"]])  # the widest: those who run are filled up on the left
    note("west")
    for _ in range(4):
        batch.step()
        note(*PROMPTS)
    batch.keep([rows["south"], rows["west"]])
    for _ in range(4):
        batch.step()
        note("south", "west")
    batch.keep([rows["south"]])
    assert batch.mask.shape == (1, 1 + 11), "columns that nobody needs any more are gone"
    batch.keep([])
    assert batch.rows == [] and model.adapted[next(iter(model.adapted))].factors is None
    assert {name: wanted[name][: len(tokens)] for name, tokens in found.items()} == found
    assert [len(tokens) for tokens in found.values()] == [8, 12, 9]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA device is needed")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_on_an_accelerator_the_texts_are_the_same(kind: str) -> None:
    """Adapters wait on the host, and those of the running rows come along."""
    model, adapters = adapted(causal(kind, torch.float64), torch.float64)
    wanted = {name: alone(model, adapters, name, 9) for name in PROMPTS}
    model.model.to("cuda")  # type: ignore[arg-type]
    batch = RunningBatch(model, adapters.__getitem__, padding=0)
    rows = [Row(name, prompt, Sampler(0)) for name, prompt in PROMPTS.items()]
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    batch.admit(rows[:2])
    for joins in (False, False, True, False, False):
        if joins:
            batch.admit(rows[2:])
        batch.step()
        for row in batch.rows:
            found[row.model].append(row.last)
    for name, tokens in found.items():
        assert tokens == wanted[name][1 : 1 + len(tokens)], name


@pytest.fixture(scope="module")
def loaded(generation_run: Path) -> LoadedRun:
    return load_run(generation_run, device="cpu")


@pytest.fixture
def passes(loaded: LoadedRun) -> Iterator[list[int]]:
    """How many rows each forward pass of the base model had."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(len(kwargs["input_ids"]))

    hook = loaded.model.model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


def write(loaded: LoadedRun, asked: list[tuple[str, str]], count: int, **sampling: Any) -> list[str]:
    """What is written for (model, prompt) pairs that wait together."""
    task = loaded.task
    assert isinstance(task, Generation)
    prompts = Prompts(task, loaded.model)
    writer = Writer(loaded.model, served_models(loaded), prompts, size=8, most_waiting=64)
    texts = ["" for _ in asked]

    def tell(piece: Any) -> None:
        texts[piece.index] += piece.text

    writer.submit(
        [
            TextJob(
                model,
                prompts.of_texts([prompt])[0],
                Sampler(**sampling),
                tell=tell,
                text=prompts.growing(()),
                most=count,
                index=i,
            )
            for i, (model, prompt) in enumerate(asked)
        ]
    )
    while not writer.idle:
        writer.turn()
    return texts


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}])
def test_a_mixed_batch_is_one_pass_for_all(
    sampling: dict[str, Any], loaded: LoadedRun, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pf2lora.serve.prompts.end_tokens", lambda *_: frozenset())  # all are of one length
    asked = [(name, food) for name in (*NAMES, "common", "base") for food in ("soup", "fish and chips")]
    together = write(loaded, asked, 9, **sampling)
    # 10 texts, 8 places: 8 read their prompts in one pass and write in 8 more, then 2 do.
    assert passes == [8] * 9 + [2] * 9
    passes.clear()
    assert [write(loaded, [one], 9, **sampling)[0] for one in asked] == together
    assert passes == [1] * 9 * len(asked)
    assert len(set(together)) > 5, "models that write the same would show nothing"


def test_what_is_served_is_what_each_client_deploys(loaded: LoadedRun) -> None:
    """Greedy, it is what transformers' own search finds with the client's adapters."""
    from dataclasses import replace

    task = loaded.task
    assert isinstance(task, Generation)
    before = task.settings
    task.settings = replace(before, beams=1, no_repeat_ngram=0, max_new_tokens=9)
    try:
        for name in (*NAMES, None):
            (wanted,) = task.generate(loaded.model, *loaded.client(name), [["soup", "bread"]])
            found = write(
                loaded, [(name or "common", "soup"), (name or "common", "bread")], 9, temperature=0.0
            )
            assert [text.strip() for text in found] == wanted
    finally:
        task.settings = before


# --- tokens --------------------------------------------------------------------------------------------------


def test_tokens_are_drawn_by_their_shares() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(seed=1)
    drawn = [choose(shares.log()[None], [sampler])[0] for _ in range(2000)]
    for token, share in enumerate(shares.tolist()):
        assert drawn.count(token) / 2000 == pytest.approx(share, abs=0.035)
    nucleus = Sampler(top_p=0.75, seed=1)
    assert {choose(shares.log()[None], [nucleus])[0] for _ in range(500)} == {0, 1}
    cold = Sampler(temperature=0.05, seed=1)
    assert {choose(shares.log()[None], [cold])[0] for _ in range(100)} == {0}


def test_a_seed_draws_the_same_whoever_is_beside() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone, beside = Sampler(seed=7), Sampler(seed=7)
    others = Sampler(0), Sampler(top_p=0.3, seed=8)
    for _ in range(20):
        assert choose(logits[:1], [alone]) == choose(logits, [beside, *others])[:1]
    assert Sampler().draw() != Sampler().draw()


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-6, 1e-300, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.5, 5e-324])
def test_a_temperature_near_0_is_the_likeliest(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1.0, 9.0, 9.0 - 1e-6, -torch.inf]] * 20)
    assert choose(logits, [Sampler(temperature, top_p, seed) for seed in range(20)]) == [1] * 20


def test_outputs_that_are_no_numbers_give_no_token() -> None:
    logits = torch.tensor([[0.0, torch.nan], [0.0, 9.0], [-torch.inf, -torch.inf]])
    for samplers in ([Sampler(0)] * 3, [Sampler(0.1, top_p, seed=1) for top_p in (1.0, 1.0, 0.5)]):
        assert choose(logits, samplers) == [BROKEN, 1, BROKEN]


# --- text ----------------------------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()  # a token for each byte: a character is up to four


def decode(tokens: list[int]) -> str:
    return str(TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False))


def pieces(text: str, stops: list[str], *, blank_before: bool = False) -> tuple[list[str], bool]:
    growing = GrowingText(decode, stops, blank_before=blank_before)
    found = []
    for token in TOKENIZER(text)["input_ids"]:
        found.append(growing.add(token))
        if growing.stopped:
            return found, True
    found.append(growing.end())
    return found, growing.stopped


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.text(st.sampled_from("ab é€😀 \n"), max_size=20),
    st.lists(st.text(st.sampled_from("ab é😀\n"), min_size=1, max_size=3), max_size=4),
)
def test_pieces_are_the_text_up_to_its_first_stop(text: str, stops: list[str]) -> None:
    found, stopped = pieces(text, stops)
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    assert stopped == (cut is not None)
    # A stop that ends first is seen first: one that began earlier and ends later was never whole.
    if cut is None:
        assert "".join(found) == text
    else:
        assert text.startswith("".join(found)) and not any(stop in "".join(found) for stop in stops)
    assert not any("�" in piece for piece in found)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("\n soup", ["\n"], ""),
        (" \nUser: hi", ["\nUser:"], ""),
        ("\n\nsoup\n\n", ["\n\n\n"], "soup\n\n"),
        ("\n", ["\n\n"], ""),
        (" soup and bread", [" "], "soup"),  # the blank of training is no part of the text
        ("  \n soup", [], "soup"),
    ],
)
def test_a_stop_may_be_what_a_text_begins_with(text: str, stops: list[str], shown: str) -> None:
    found, stopped = pieces(text, stops, blank_before=True)
    assert "".join(found) == shown and stopped is any(stop in text for stop in stops)


def test_half_a_character_is_held_back_and_the_first_blank_left_out() -> None:
    found, _ = pieces(" 😀!", [], blank_before=True)
    assert [piece for piece in found if piece] == ["😀", "!"]
    growing = GrowingText(decode, [])
    assert growing.add(TOKENIZER("😀")["input_ids"][0]) == "" and growing.end() == "�"


@pytest.mark.parametrize("end", ["\n", "<|endoftext|>"])  # special to the tokenizer or not
def test_what_ends_a_text_is_counted_and_no_part_of_it(end: str) -> None:
    told: list[Piece] = []
    job = TextJob("north", [1], tell=told.append, text=GrowingText(decode), most=30)
    ends = frozenset(TOKENIZER(end)["input_ids"])
    for job.last in TOKENIZER(f"soup{end}fish")["input_ids"]:
        if job.advance(ends):
            break
    assert "".join(piece.text for piece in told) == "soup"
    assert (told[-1].finish, job.written) == ("stop", 5)
