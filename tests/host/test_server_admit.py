"""Admission (S2): every field of every body against hostile values, made from the schemas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tests.kit.server import call, decoded, face, is_refusal, victims
from trine.config import Config
from trine.core.types import Sampling
from trine.server import limits
from trine.server.admit import measure, parse
from trine.server.apis.chat import Chat
from trine.server.apis.completions import Completions
from trine.server.app import every_route
from trine.server.ask import Ask, Facts
from trine.server.catalogue import Refusal
from trine.server.infer import admit
from trine.server.route import Caller

BODIES = {route.path: route.body for route in every_route() if route.body and route.access != "admin"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
}
INTEGERS = ["-1", "-2147483648", "2147483648", "9223372036854775808", "-9223372036854775809", "1.5", "1.0", "1e2",
            '"1"', "true", "null", "0", "17", "1" * 5000, "[1]", "{}", "NaN", "Infinity", "1e999", "-0", "-0.0"]  # fmt: skip
FLOATS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-320", "-1e-320", "-0.0", "1e-7", '"1"', "true", "null",
          "[]", "{}", "1e308", "-100", "2.0000001", "1", "0", "1" * 400]  # fmt: skip
OTHERS = ["NaN", "true", "null", "0", "-1", '""', "[]", "[[]]", "{}", '"x"', '[""]', '["\\u0000"]', '"' + "x" * 300 + '"',
          "[" + ",".join(['"s"'] * 17) + "]", "[" + ",".join(["1"] * 65) + "]", '{"a":1}', '{"1":"2"}', "[null]",
          '[{"role":"user"}]', '[{"role":"root","content":"x"}]', '"\\ud800"', '["\\udfff"]', '{"\\ud800":1}']  # fmt: skip


def number(field: inspect.Field) -> inspect.IntType | inspect.FloatType | None:
    """The number that a field may be, if it is a number field."""
    kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    return next((kind for kind in kinds if isinstance(kind, inspect.IntType | inspect.FloatType)), None)


def rows(path: str) -> Iterator[tuple[str, str, bool | None]]:
    """(field, JSON text of a value, may it be: None where other rules decide)."""
    info = inspect.type_info(BODIES[path])
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        kind = number(field)
        if isinstance(kind, inspect.IntType | inspect.FloatType):
            for text in INTEGERS if isinstance(kind, inspect.IntType) else FLOATS:
                yield field.encode_name, text, allowed(kind, text)
        else:
            for text in OTHERS:
                yield field.encode_name, text, None


def allowed(kind: inspect.IntType | inspect.FloatType, text: str) -> bool:
    """What the ranges in the schema say, and JSON, and that a float is not almost nothing."""
    try:
        value = json.loads(text, parse_constant=lambda word: word)
    except ValueError:
        return False
    if value is None:
        return True
    wanted = int if isinstance(kind, inspect.IntType) else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        return False
    if isinstance(kind, inspect.FloatType) and 0 < abs(value) < limits.SMALLEST:
        return False
    return (kind.ge is None or value >= kind.ge) and (kind.le is None or value <= kind.le)


def test_every_body_is_in_the_table() -> None:
    assert set(BODIES) == set(GOOD)


@pytest.mark.parametrize("path", list(GOOD))
def test_hostile_fields_are_refused_by_name_and_harm_nobody(path: str) -> None:
    async def run() -> None:
        app, service, engine = face()
        async with victims(app):
            for field, text, may in rows(path):
                rest = {name: value for name, value in GOOD[path].items() if name != field}
                raw = json.dumps(rest)[:-1] + (", " if rest else "") + f'"{field}": {text}}}'
                done = await call(app, "POST", path, raw.encode())
                assert done.status in (200, 400, 404), (field, text, done.content)
                if done.status != 200:
                    code = is_refusal(done.status, done.content)
                    param = decoded(done.content)["error"]["param"]
                    assert may is not True or code in ("context_length_asked", "invalid_value"), (field, text)
                    whole = ("invalid_number", "invalid_json", "invalid_text")
                    assert code in whole or (param or "").startswith(field) or "NaN" in text, (
                        field,
                        text,
                        param,
                    )
                else:
                    assert may is not False, (field, text, done.content)
                assert all(finite(request.sampling) for request in engine.requests)
        assert not engine.live and not service.live

    asyncio.run(run())


def finite(sampling: Sampling) -> bool:
    numbers = [v for v in msgspec.structs.asdict(sampling).values() if isinstance(v, float)]
    return all(abs(v) < 1e9 and str(v) != "-0.0" for v in numbers)


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b"null", "not_an_object"),
    (b"[]", "not_an_object"),
    (b'"x"', "not_an_object"),
    (b"{}garbage", "invalid_json"),
    (b"\xff\xfe{}", "invalid_json"),
    (b"\xef\xbb\xbf{}", "invalid_json"),
    (b'{"prompt": "\xff"}', "invalid_json"),
    (b'{"prompt": "a\nb"}', "invalid_json"),
    (b"{'prompt': 'x'}", "invalid_json"),
    (b'{"prompt": "x",}', "invalid_json"),
    (b'{"prompt": 01}', "invalid_json"),
    (b'{"prompt": "x", "prompt": "y"}', "duplicate_key"),
    (b'{"prompt": "x", "user": {"a": 1, "a": 2}}', "duplicate_key"),
    (b'{"prompt": "x", "\\u0070rompt": "y"}', "duplicate_key"),
    (b'{"prompt": "x", "user": NaN}', "invalid_number"),
    (b'{"prompt": "x", "user": [1e999]}', "invalid_number"),
    (b'{"prompt": "x", "user": -Infinity}', "invalid_number"),
    (b'{"prompt": "x", "user": ' + b"9" * 5000 + b"}", "invalid_number"),
    (b'{"prompt": "\\ud800"}', "invalid_text"),
    (b'{"prompt": "x", "user": {"\\udc00": 1}}', "invalid_text"),
    (b'{"prompt": ' + b"[" * 63 + b"]" * 63 + b"}", "invalid_type"),
    (b'{"prompt": ' + b"[" * 64 + b"]" * 64 + b"}", "json_too_deep"),
    (b'{"user": ' + b'{"a":' * 64 + b"1" + b"}" * 64 + b"}", "json_too_deep"),
    (b"[" * 20_000, "json_too_deep"),
    (b'{"a":' * 20_000, "json_too_deep"),
    (b"[" * 1_000_000, "json_too_large"),
    (b'{"prompt": [' + b"1," * 500_000 + b"1]}", "json_too_large"),
    (b'{"prompt": [' + b'"",' * 500_000 + b'""]}', "json_too_large"),
    (b'{"prompt": [' + b"{}," * 100_000 + b"{}]}", "json_too_large"),
]


@pytest.mark.parametrize("raw,code", BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_bad_bodies_are_refused(raw: bytes, code: str) -> None:
    async def run() -> None:
        app = face()[0]
        async with victims(app):
            for path in GOOD:
                done = await call(app, "POST", path, raw)
                found = is_refusal(done.status, done.content)
                assert done.status == 400
                if path == "/v1/completions" or code != "invalid_type":
                    assert found == code

    asyncio.run(run())


def test_texts_full_of_commas_and_brackets_are_only_texts() -> None:
    text = "[{1,2}," * 100_000
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    assert parse(json.dumps({"prompt": '\\"[,' * 40_000}).encode())


def test_pairs_of_surrogates_are_one_character() -> None:
    assert parse(b'{"a": "\\ud83d\\ude42 \\\\ud800"}') == {"a": "🙂 \\ud800"}


def test_the_cost_of_a_body_is_counted_before_it_is_read() -> None:
    most = limits.JSON_ITEMS
    assert len(parse(b'{"prompt": [' + b"1," * (most - 2) + b"1]}")["prompt"]) == most - 1
    for raw in (
        b'"' * 8_000_000,
        b"," * 8_000_000,
        b"\\" * 8_000_000,
        b'"\\' * 4_000_000,
        b"[]," * 2_000_000,
    ):
        with pytest.raises(Refusal):
            parse(raw)


@pytest.mark.parametrize(
    "body,field,word",
    [
        ({"temperatur": 1}, "temperatur", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor", "not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"audio": {}}, "audio", "not supported"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"best_of": True}, "best_of", "not supported"),
        ({"<script>": 1}, "a field", "unknown"),
        ({"x" * 5000: 1}, "a field", "unknown"),
        ({"../../etc/passwd": 1}, "a field", "unknown"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
         "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens", "max_tokens"),
        ({"min_tokens": 4}, "min_tokens", "3"),
        ({"logit_bias": {"01": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "-100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias[0]", "from 0 to"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({"stop_token_ids": [1, 99999]}, "stop_token_ids[1]", "from 0 to"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "from 0 to"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": ["a" * 257]}, "stop[0]", "256"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least 1"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role", "values"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool is not supported"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "not supported"),
        ({"messages": [{"role": "user", "content": "x", "rank": 1}]}, "messages[0].rank", "unknown"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type", "image_url is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "argument"),
        ({"chat_template_kwargs": {"__class__ ": 1}}, "a field", "argument"),
        ({"chat_template_kwargs": {"x": "y" * 4097}}, "chat_template_kwargs.x", "4096"),
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs[...]", ""),
        ({"n": 10**18}, "n", "at most 16"),
        ({"priority": 1}, "priority", "--policy priority"),
        ({"priority": -(2**31) - 1}, "priority", "at least"),
        ({"priority": True}, "priority", "of type int"),
    ],
)  # fmt: skip
def test_the_field_that_is_wrong_is_named(body: dict[str, Any], field: str, word: str) -> None:
    raw = json.dumps(GOOD["/v1/chat/completions"] | body).encode()
    done = asyncio.run(call(face()[0], "POST", "/v1/chat/completions", raw))
    is_refusal(400, done.content)
    error = decoded(done.content)["error"]
    assert error["param"] == field
    assert word in error["message"] and (field in error["message"])


@pytest.mark.parametrize(
    "body",
    [
        {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "best_of": 1, "priority": 0},
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto"},
        {"temperature": None, "n": None, "stop": None, "seed": None, "logit_bias": None, "stream": None},
        {"parallel_tool_calls": True, "modalities": ["text"], "logprobs": False, "top_logprobs": 0},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "x", "name": "bob"},
            {"role": "assistant", "content": "y", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "tool_calls": None},
            {"role": "user", "content": ""},
        ]},
    ],
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_taken(body: dict[str, Any]) -> None:
    raw = json.dumps(GOOD["/v1/chat/completions"] | body).encode()
    done = asyncio.run(call(face()[0], "POST", "/v1/chat/completions", raw))
    assert done.status == 200, done.content
    ignored = [field for field in ("user", "metadata", "service_tier") if field in body]
    assert done.headers.get("x-ignored-fields", "").split(",") == (ignored or [""])


def test_prompts_that_are_empty_or_of_two_kinds_are_refused() -> None:
    async def run() -> None:
        app, _, engine = face()
        vocab = engine.words.vocab
        for prompt in ("", [], [[]], [""], ["a", ""], [[1], []], ["a", 1], [1, [1]], [[1], "a"], [-1], [vocab],
                       [[0], [2**31]], [2**63], [True], [1.5], [[True]], None, {}, 5, [None], ["a"] * 1025):  # fmt: skip
            done = await call(app, "POST", "/v1/completions", {"prompt": prompt} if prompt != [2**63] else
                              b'{"prompt": [9223372036854775808]}')  # fmt: skip
            assert done.status == 400 and is_refusal(400, done.content), prompt
        for ids in ([-1], [vocab], [2**31], [1, 2, vocab + 1]):
            done = await call(app, "POST", "/detokenize", {"tokens": ids})
            assert is_refusal(done.status, done.content) == "invalid_token"
        assert not engine.requests
        done = await call(app, "POST", "/v1/completions", {"prompt": [0, vocab - 1]})
        assert done.status == 200

    asyncio.run(run())


def test_tokens_and_text_go_there_and_back() -> None:
    async def run() -> None:
        app, _, engine = face()
        for text in ("the stop 漢字 🙂", "<|im_start|>", " ", "\x00"):
            found = (await call(app, "POST", "/tokenize", {"prompt": text, "model": "test"})).json()
            assert found["count"] == len(found["tokens"]) > 0 and found["max_model_len"] == 512
            assert not set(found["tokens"]) & engine.words.control
            back = (await call(app, "POST", "/detokenize", {"tokens": found["tokens"]})).json()
            assert back == {"prompt": text}
        chat = await call(app, "POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
        assert chat.json()["tokens"][0] in engine.words.control
        for bad in (
            {},
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            {"prompt": "x", "model": "y"},
        ):
            done = await call(app, "POST", "/tokenize", bad)
            assert is_refusal(done.status, done.content)

    asyncio.run(run())


def test_bodies_are_counted_while_they_come() -> None:
    async def run() -> None:
        app = face(config=None)[0]
        good = json.dumps(GOOD["/v1/completions"]).encode()
        parts = [bytes([byte]) for byte in good]
        chunked = {"transfer-encoding": "chunked"}
        done = await call(app, "POST", "/v1/completions", good, chunked, parts=parts)
        assert done.status == 200
        large = [b" " * 65_536] * 130
        done = await call(app, "POST", "/v1/completions", good, chunked, parts=large)
        assert is_refusal(done.status, done.content) == "body_too_large"
        assert done.headers["connection"] == "close"

    asyncio.run(run())


def test_many_large_bodies_at_once_are_not_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(limits, "HELD_BODIES", 2)
        app = face(config=Config(max_body_bytes=10_000))[0]
        chunked = {"transfer-encoding": "chunked"}
        slow = [asyncio.Event() for _ in range(4)]

        async def part(event: asyncio.Event) -> Any:
            done = await call(app, "POST", "/tokenize", b"", chunked, parts=[b" " * 9_000, event, b"{}"])
            return done.status

        tasks = [asyncio.create_task(part(event)) for event in slow]
        for _ in range(20):
            await asyncio.sleep(0)
        for event in slow:
            event.set()
        assert sorted(await asyncio.gather(*tasks)) == [400, 400, 429, 429]
        assert (await call(app, "POST", "/tokenize", {"prompt": "x"})).status == 200

    asyncio.run(run())


FACTS = Facts("test", 300, 512, 64)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({field.encode_name for body in BODIES.values() for field in msgspec.structs.fields(body)})


@settings(max_examples=80, deadline=None)
@given(
    body=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=12), JSON, max_size=5), chat=st.booleans()
)
def test_any_body_is_an_ask_or_a_refusal(body: dict[str, Any], chat: bool) -> None:
    dialect = Chat() if chat else Completions()
    path = dialect.path
    for value in (body, GOOD[path] | body):
        try:
            ask = admit(dialect, json.dumps(value).encode(), FACTS, Caller("id", "tenant"))
        except Refusal as error:
            assert 400 <= error.status < 500
        else:
            assert isinstance(ask, Ask) and ask.space == "tenant" and finite(ask.sampling)
            assert 1 <= ask.n <= 16 and all(0 <= token < 300 for token in ask.sampling.stop_ids)


@settings(max_examples=80, deadline=None)
@given(raw=st.binary(max_size=200) | st.text('{}[]",:1ea\\u0d8', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_refusal(raw: bytes) -> None:
    try:
        found = parse(raw)
    except Refusal as error:
        assert error.status == 400
    else:
        assert json.loads(raw) == found
        measure(raw)
