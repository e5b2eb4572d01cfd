"""The server as OpenAI's own client library finds it: texts whole and streamed, errors by their classes, tokens."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import GREEDY, NAMES, Served, complete, serving

from pf2lora.serve.access import read_tokens
from pf2lora.serve.bodies import UNSUPPORTED, Body, ChatBody, CompletionBody, PredictBody, parsed
from pf2lora.serve.errors import ApiError


@pytest.fixture(scope="module")
def served(generation_run: Path) -> Iterator[Served]:
    with serving(generation_run, batch=4, queue=8, body=20_000) as running:
        yield running


def test_models_are_listed(served: Served) -> None:
    found = served.client().models.list().data
    assert [model.id for model in found] == ["common", *NAMES, "base"]
    assert served.client().models.retrieve("north").id == "north"


def test_requests_of_all_clients_at_once_are_answered_as_each_alone(served: Served) -> None:
    asked = [(name, food) for name in (*NAMES, "common", "base") for food in ("soup", "fish and chips")]
    alone = [complete(served, *one) for one in asked]
    assert len(set(alone)) > 5
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(lambda one: complete(served, *one), asked)) == alone


@pytest.mark.parametrize("options", [GREEDY, {"seed": 5, "top_p": 0.9, "max_tokens": 30}])
def test_a_stream_is_the_whole_text_in_pieces(served: Served, options: dict[str, Any]) -> None:
    client = served.client()
    whole = client.completions.create(model="west", prompt="soup", **options)
    assert whole.usage and whole.usage.prompt_tokens == 5 and whole.object == "text_completion"
    assert whole.usage.total_tokens == 5 + whole.usage.completion_tokens
    stream = list(
        client.completions.create(
            model="west", prompt="soup", stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert len(stream) > 2 and stream[-1].choices == [] and stream[-1].usage == whole.usage
    assert "".join(chunk.choices[0].text for chunk in stream[:-1]) == whole.choices[0].text
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_chat_without_a_template_is_the_runs_own_prompt(served: Served) -> None:
    chat = served.client().chat.completions
    asked: Any = [{"role": "user", "content": "soup"}]
    whole = chat.create(model="north", messages=asked, **GREEDY)
    assert whole.choices[0].message.content == complete(served, "north", "soup")
    assert whole.choices[0].message.role == "assistant"
    pieces = [chunk.choices[0] for chunk in chat.create(model="north", messages=asked, stream=True, **GREEDY)]
    assert pieces[0].delta.role == "assistant"
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason
    turns: Any = [
        *asked,
        {"role": "assistant", "content": "hot"},
        {"role": "user", "content": [{"type": "text", "text": "bread"}]},
    ]
    several = chat.create(model="north", messages=turns, max_completion_tokens=9, temperature=0)
    assert several.choices[0].message.content == complete(
        served, "north", "user: soup\nassistant: hot\nuser: bread"
    )


def test_several_prompts_of_one_request_and_a_stop(served: Served) -> None:
    found = served.client().completions.create(model="south", prompt=["soup", "rice"], **GREEDY)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert [choice.text for choice in found.choices] == [
        complete(served, "south", p) for p in ("soup", "rice")
    ]
    text = found.choices[0].text
    stop = text[3]
    cut = (
        served.client()
        .completions.create(model="south", prompt="soup", stop=[stop, "§§"], **GREEDY)
        .choices[0]
    )
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"


def test_drawn_texts_differ_unless_a_seed_says_otherwise(served: Served) -> None:
    texts = [complete(served, "base", "soup", temperature=1.5, seed=seed) for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_several_texts_for_each_prompt(served: Served) -> None:
    drawn: Any = {"temperature": 1.5, "max_tokens": 9}
    wanted = [complete(served, "base", "soup", seed=seed, **drawn) for seed in (3, 4)]
    wanted += [complete(served, "base", "rice", seed=seed, **drawn) for seed in (5, 6)]
    prompts: Any = {"model": "base", "prompt": ["soup", "rice"], "n": 2, "seed": 3}
    found = served.client().completions.create(**prompts, **drawn)
    assert [choice.text for choice in found.choices] == wanted and len(set(wanted)) == 4
    assert found.usage and found.usage.prompt_tokens == 2 * 5
    chat: Any = {"model": "base", "messages": [{"role": "user", "content": "soup"}], "n": 2, "seed": 3}
    texts = ["", ""]
    for chunk in served.client().chat.completions.create(**chat, **drawn, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == wanted[:2]
    whole = served.client().chat.completions.create(**chat, **drawn)
    assert [choice.message.content for choice in whole.choices] == texts


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 9}, "prompt", "9 at once, and at most 8 may wait"),
        ({"best_of": 2}, "best_of", "only 1 is supported"),
        ({"logprobs": 3}, "logprobs", "only false is supported"),
        ({"logprobs": 0}, "logprobs", "logprobs is 0: only false is supported"),
        ({"n": True}, "n", "n is True: Input should be a valid integer"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"presence_penalty": 0.5}, "presence_penalty", "only 0 is supported"),
        ({"extra_body": {"min_p": 0.1}}, "min_p", "no parameter that this server knows"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5000}, "prompt", "prompt and answer together may have 128"),
        ({"seed": 2**70}, "seed", "less than"),
        ({"stop": ["a"] * 5}, "stop", "up to 4 texts"),
        ({"stop": ""}, "stop", "up to 4 texts"),
        ({"prompt": " "}, "prompt", "an empty prompt"),
        ({"prompt": [1, 2]}, "prompt", "not tokens"),
        ({"prompt": "soup " * 50}, "prompt", "the prompt has 251 tokens"),
        ({"model": 3}, "model", "valid string"),
    ],
)
def test_a_bad_request_says_what_is_wrong(
    served: Served, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        served.client().completions.create(**{"model": "north", "prompt": "soup"} | options)
    assert error.value.param == param and words in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user"}],
        [{"role": "user", "content": "  "}],
        "soup",
    ],
)
def test_a_bad_chat_says_what_is_wrong(served: Served, messages: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        served.client().chat.completions.create(model="north", messages=messages)


def test_harmless_settings_are_taken(served: Served) -> None:
    harmless = {
        "n": 1,
        "echo": False,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "user": "me",
        "suffix": None,
    }
    harmless["extra_body"] = {
        "store": False,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "tools": None,
    }
    assert complete(served, "north", "soup", **harmless) == complete(served, "north", "soup")


def post(served: Served, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """A request as bytes; the status and the JSON of the answer."""
    asked = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    request = urllib.request.Request(f"{served.address}{path}", body, asked)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "broken JSON"),
        (b"{", 400, "broken JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b"\xff\xfe", 400, "not UTF-8"),
        (b'{"model": "north", "model": "south"}', 400, "stands twice"),
        (b'{"temperature": NaN}', 400, "NaN is no number"),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b"[" * 3000, 400, "nested"),
        (b'{"seed": ' + b"9" * 6000 + b"}", 400, "digits"),
        (b"{}", 400, "model is missing"),
        (b'{"model": "north"}', 400, "prompt is missing"),
        (b'{"model": "nobody", "prompt": "a"}', 404, "there is no model 'nobody'"),
        (b'{"model": "../north", "prompt": "a"}', 404, "there is no model"),
        (b" " * 20_001, 413, "larger than 20000 bytes"),
        (b" " * 500_000, 413, "larger than 20000 bytes"),
    ],
)
def test_bodies_that_are_none(served: Served, body: bytes, status: int, words: str) -> None:
    found, error = post(served, "/v1/completions", body)
    assert found == status and words in error["error"]["message"], error
    assert set(error["error"]) == {"message", "type", "param", "code"}


def test_what_else_is_no_request(served: Served) -> None:
    good = json.dumps({"model": "north", "prompt": "soup"}).encode()
    assert (
        post(served, "/v1/completions", good, Content_Type="text/plain")[0] == 415
    )  # as any web page may send
    assert post(served, "/v1/completions", good, Host="rebound.example")[0] == 403
    status, error = post(served, "/v1/completions", good, Host="[::1")
    assert status == 400 and error["error"]["message"] == "the Host header is no address"
    assert post(served, "/v1/nothing", good)[0] == 404
    status, error = post(served, "/v1/predict", b'{"model": "north", "inputs": ["soup"]}')
    assert status == 400 and "POST /v1/completions" in error["error"]["message"]
    with urllib.request.urlopen(f"{served.address}/health") as answer:
        assert json.load(answer) == {"status": "ok"}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    [*CompletionBody.model_fields, *ChatBody.model_fields, *UNSUPPORTED, "inputs", "other"]
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(fields, values, max_size=5), st.sampled_from([CompletionBody, ChatBody, PredictBody]))
def test_whatever_is_asked_for_is_taken_or_refused_in_a_line(body: dict[str, Any], kind: type[Body]) -> None:
    found: Body | ApiError
    try:
        found = parsed(kind, json.dumps({"model": "north", "prompt": "soup"} | body).encode())
    except ApiError as error:
        found = error
    if isinstance(found, ApiError):
        assert found.status == 400 and "\n" not in found.message and len(found.message) < 500
    else:
        assert isinstance(found, kind)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.dictionaries(fields.filter(lambda name: name != "stream"), values, max_size=3))
def test_no_request_breaks_the_server(served: Served, body: dict[str, Any]) -> None:
    asked = {"model": "north", "prompt": "soup", "max_tokens": 2} | body
    assert post(served, "/v1/completions", json.dumps(asked).encode())[0] in (200, 400, 404)


# --- tokens --------------------------------------------------------------------------------------------------

TOKENS = {"north": "n" * 20, "south": "s" * 20, "operator": "o" * 20}


@pytest.fixture(scope="module")
def guarded(generation_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    lines = [f'[{name}]\ntoken = "{token}"\n' for name, token in TOKENS.items()]
    file.write_text("".join(lines) + 'models = ["*"]\n')
    access = read_tokens(file, ["common", *NAMES, "base"], ["common", "base"])
    with serving(generation_run, access, queue=8) as running:
        yield running


def test_a_token_opens_its_own_models_and_no_others(guarded: Served) -> None:
    def models(token: str) -> list[str]:
        return [model.id for model in guarded.client(token).models.list().data]

    assert models(TOKENS["operator"]) == ["common", *NAMES, "base"]
    assert models(TOKENS["north"]) == ["common", "north", "base"]
    client = guarded.client(TOKENS["north"])
    assert client.completions.create(model="north", prompt="soup", **GREEDY).choices[0].text
    told = []
    for name in ("south", "nobody"):
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model=name, prompt="soup")
        told.append(str(error.value).replace(name, "…"))
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    assert told[0] == told[1], "who else is served is nobody's business"


@pytest.mark.parametrize("token", ["", "wrong", "n" * 19, "n" * 21, "ñ" * 20, TOKENS["north"].upper()])
def test_a_wrong_token_opens_nothing(guarded: Served, token: str) -> None:
    for header in (f"Bearer {token}", f"Basic {token}", token, ""):
        body = b'{"model": "common", "prompt": "soup"}'
        sent = {"Authorization": header.encode("utf8").decode("latin1")}
        status, error = post(guarded, "/v1/completions", body, **sent)
        assert status == 401 and error["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        guarded.client("wrong").models.list()
