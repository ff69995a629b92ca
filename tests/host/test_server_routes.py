"""The door, as a table over every route of the live route table: a route without a row fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.server import Reply, ScriptedEngine, Template, call, face, is_refusal, tokenizer, victims
from trine.config import Config
from trine.errors import ConfigError
from trine.server.app import every_route, make_app
from trine.server.catalogue import CATALOGUE
from trine.server.route import Json, Route
from trine.server.service import Service

KEY = "a secret key"
BEARER = {"authorization": f"Bearer {KEY}"}

# A request of each route that is answered with 200. Every route must have one.
ROWS: dict[tuple[str, str], Any] = {
    ("POST", "/v1/chat/completions"): {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    ("POST", "/v1/completions"): {"prompt": "hi", "max_tokens": 3},
    ("POST", "/tokenize"): {"prompt": "hi"},
    ("POST", "/detokenize"): {"tokens": [1, 2]},
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{id}"): None,
    ("GET", "/health"): None,
    ("GET", "/ping"): None,
    ("GET", "/ready"): None,
    ("GET", "/version"): None,
    ("GET", "/load"): None,
    ("GET", "/metrics"): None,
    ("GET", "/openapi.json"): None,
    ("POST", "/flush_cache"): None,
    ("POST", "/abort"): {"all": True},
    ("GET", "/server_info"): None,
}
OPEN = {"/health", "/ping", "/ready", "/version"}  # answered without a key
ADMIN = {"/flush_cache", "/abort", "/server_info"}  # never on the public listener
ROUTES = every_route()
WORDS = tokenizer()

every = pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
Ask = Callable[..., Reply]


def app_of(config: Config | None = None, *, admin: bool = False) -> Any:
    engine = ScriptedEngine(WORDS)
    service = Service(engine, WORDS, Template(), model="test")
    return make_app(service, config or Config(api_key=(KEY,)), admin=admin)


@pytest.fixture(scope="module")
def ask() -> Any:
    """One request of a route's row, in this process."""
    runner = asyncio.Runner()
    apps = {admin: app_of(admin=admin) for admin in (False, True)}

    def one(
        route: Route,
        headers: dict[str, str] | None = None,
        *,
        admin: bool = False,
        method: str | None = None,
        config: Config | None = None,
    ) -> Reply:
        app = app_of(config, admin=admin) if config else apps[admin]
        path = route.path.replace("{id}", "test")
        body = ROWS[route.method, route.path]
        fields = BEARER if headers is None else headers
        return runner.run(call(app, method or route.method, path, body, fields))

    with runner:
        yield one


def route_of(path: str) -> Route:
    return next(route for route in ROUTES if route.path == path)


def test_every_route_has_a_row_and_a_class() -> None:
    assert {(route.method, route.path) for route in ROUTES} == set(ROWS)
    for route in ROUTES:
        wanted = "liveness" if route.path in OPEN else "admin" if route.path in ADMIN else "inference"
        assert route.access == wanted, route.path


@pytest.mark.parametrize(
    "change", [{"access": ""}, {"access": "public"}, {"method": "DELETE"}, {"path": "relative"}]
)
def test_a_route_that_nobody_classed_does_not_start(change: dict[str, str]) -> None:
    good: dict[str, Any] = {"method": "GET", "path": "/new", "access": "inference", "run": nothing}
    service = face()[1]
    make_app(service, Config(), routes=(Route(**good),))
    with pytest.raises(ConfigError):
        make_app(service, Config(), routes=(Route(**(good | change)),))
    with pytest.raises(ConfigError):
        make_app(service, Config(), routes=(Route(**good), Route(**good)))


async def nothing(*_: Any) -> Json:
    return Json({})


@every
def test_a_route_answers_whom_it_should(route: Route, ask: Ask) -> None:
    done = ask(route, admin=route.path in ADMIN)
    assert done.status == 200, done.content
    assert done.headers["x-request-id"] and done.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in done.headers and "server" not in done.headers


@every
def test_without_the_key_there_is_no_answer(route: Route, ask: Ask) -> None:
    for header in (None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY} x"):
        done = ask(route, {} if header is None else {"authorization": header})
        if route.path in ADMIN:
            assert done.status == 404
        elif route.path in OPEN:
            assert done.status == 200
        else:
            assert done.status == 401 and done.headers["www-authenticate"] == "Bearer"
            assert is_refusal(401, done.content) in ("missing_api_key", "invalid_api_key")
            assert KEY not in done.content.decode()


@every
def test_admin_routes_are_not_in_public_and_inference_is_not_in_admin(route: Route, ask: Ask) -> None:
    public, admin = ask(route), ask(route, admin=True)
    assert (public.status == 404) == (route.path in ADMIN)
    assert (admin.status == 404) == (route.path not in ADMIN | OPEN)


@every
def test_another_host_is_refused_before_anything_else(route: Route, ask: Ask) -> None:
    for host in (
        "evil.example", "localhost.evil.example", "localhost@evil", "a/x?", "a?", "a#", "", "localhost:x",
        "localhost:123456", "127.0.0.1.nip.io", "[::1", "2130706433", "localhost.", "x" * 5000, "\xe9", "a b",
    ):  # fmt: skip
        done = ask(route, BEARER | {"host": host})
        assert done.status == 421 and is_refusal(421, done.content) == "wrong_host", host


def test_hosts_that_are_allowed(ask: Ask) -> None:
    config = Config(host="10.1.2.3", insecure=True, allowed_hosts=("API.example",))
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:80", "api.example", "10.1.2.3"):
        assert ask(route_of("/version"), {"host": host}, config=config).status == 200
    config = Config(host="0.0.0.0", insecure=True)
    assert ask(route_of("/version"), {"host": "0.0.0.0"}, config=config).status == 421


@every
def test_another_origin_is_refused_whatever_the_method(route: Route, ask: Ask) -> None:
    for origin in ("http://evil.example", "null", "https://localhost", "http://localhost:81", ""):
        for method in (route.method, "OPTIONS", "DELETE", "PATCH", "TRACE", "MADEUP"):
            done = ask(route, BEARER | {"origin": origin}, method=method)
            assert done.status == 403 and is_refusal(403, done.content) == "wrong_origin"
            assert "access-control-allow-origin" not in done.headers


def test_an_allowed_origin_may_ask_and_its_browser_is_told_so(ask: Ask) -> None:
    route, page = route_of("/v1/chat/completions"), {"origin": "https://page.example"}
    config = Config(api_key=(KEY,), allowed_origins=("https://page.example",))
    told = ask(route, page, method="OPTIONS", config=config)
    assert told.status == 200 and "authorization" in told.headers["access-control-allow-headers"]
    done = ask(route, BEARER | page, config=config)
    assert done.status == 200 and done.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-credentials" not in done.headers
    own = ask(route, BEARER | {"origin": "http://localhost"}, config=config)
    assert own.status == 200 and "access-control-allow-origin" not in own.headers


@every
def test_another_method_is_nothing(route: Route, ask: Ask) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "MADEUP", "get"):
        if (method, route.path) not in ROWS:
            done = ask(route, method=method)
            assert done.status == 404 and is_refusal(404, done.content)
    if route.method == "GET" and route.path not in ADMIN:
        assert ask(route, method="HEAD").status == 200


HEADERS = [
    ({"content-type": "text/plain"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ({"content-type": "application/json; charset=utf-16"}, 415),
    ({"content-type": "application/jsonx"}, 415),
    ({"content-encoding": "gzip"}, 415),
    ({"content-encoding": "identity, br"}, 415),
    ({"content-length": "99999999999"}, 413),
    ({"content-length": "9" * 30}, 413),
    ({"content-length": "-1"}, 400),
    ({"content-length": "1_0"}, 400),
    ({"x-request-id": "http://evil.example:1/"}, 400),
    ({"x-request-id": "x" * 65}, 400),
    ({"x-request-id": ""}, 400),
    ({"x-request-id": "../../x"}, 400),
    ({"x-big": "x" * 17_000}, 431),
    ({f"x-{i}": "" for i in range(101)}, 431),
]


@every
def test_headers_that_are_refused(route: Route, ask: Ask) -> None:
    for headers, status in HEADERS:
        if ROWS[route.method, route.path] is None and "content-" in next(iter(headers)):
            continue  # a route without a body
        done = ask(route, BEARER | headers, admin=route.path in ADMIN)
        assert done.status == status and is_refusal(status, done.content), headers


def test_content_types_that_are_taken(ask: Ask) -> None:
    for kind in ("application/json", "application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'):
        fields = BEARER | {"content-type": kind, "content-encoding": "identity"}
        assert ask(route_of("/tokenize"), fields).status == 200


@every
def test_a_label_comes_back_and_is_only_a_label(route: Route, ask: Ask) -> None:
    done = ask(route, BEARER | {"x-request-id": "my-Label_1"}, admin=route.path in ADMIN)
    assert done.headers["x-request-id"] == "my-Label_1" and "my-Label_1" not in done.content.decode()


@pytest.mark.parametrize("key", ["", KEY])
def test_path_tricks_find_nothing(key: str) -> None:
    app = app_of()
    for path in (
        "//v1/models", "/V1/models", "/v1/../v1/models", "/v1/./models", "/v1/models/", "/v1/models.",
        "/v1/models;a", "/v1%2fmodels", "/%76%31/models", "/v1/models%00", "/v1/%2e%2e/metrics",
        "/health/../metrics", "/health/", "/health;/../metrics", "/health%2f..%2fmetrics", "/health?/../metrics",
        "\\v1\\models", "v1/models", "/v1/models%3fx", "http://localhost/v1/models", "/health\x00", "/",
        "/ready#/metrics", "/metrics ", "*", "/v1/models/../models/test", "/v1/models/test%2f", "/\xff", "/server_info",
    ):  # fmt: skip
        done = asyncio.run(call(app, "GET", path, headers={"authorization": f"Bearer {key}"}))
        assert done.status in (401, 404) and is_refusal(done.status, done.content), path
        if key:
            assert done.status == 404


def test_the_openapi_document_names_every_public_route_and_its_schemas(ask: Ask) -> None:
    document = ask(route_of("/openapi.json")).json()
    public = {(r.method.lower(), r.path) for r in ROUTES if r.access != "admin"}
    paths = document["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == public
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    chat = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert chat["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 16}
    assert paths["/v1/models"]["get"]["security"] and "security" not in paths["/health"]["get"]


def test_names_with_a_slash_are_found_and_never_are_paths() -> None:
    async def run() -> None:
        app, service, _ = face()
        service.model = "org/na me"
        for path in ("org/na%20me", "org%2Fna%20me", "%6frg/na%20me"):
            found = await call(app, "GET", f"/v1/models/{path}")
            assert found.status == 200 and found.json()["id"] == "org/na me"
        for path in (
            "org/x/../na%20me",
            "org%252Fna%20me",
            "ORG/na%20me",
            "org/na%20me/",
            "../models/org/na%20me",
            "%",
        ):
            found = await call(app, "GET", f"/v1/models/{path}")
            assert is_refusal(found.status, found.content) == "model_not_found"

    asyncio.run(run())


def test_keys_are_tenants_and_each_has_its_own_cache_space() -> None:
    async def run() -> None:
        app, _, engine = face(config=Config(api_key=("one", "two")))
        for key in ("one", "two", "one"):
            await call(app, "POST", "/v1/completions", {"prompt": "x"}, {"authorization": f"bearer {key}"})
        spaces = [request.space for request in engine.requests]
        assert spaces[0] == spaces[2] != spaces[1] and "" not in spaces
        assert not any(key in space for key in ("one", "two") for space in spaces)
        app, _, engine = face()
        await call(app, "POST", "/v1/completions", {"prompt": "x"})
        assert engine.requests[0].space == ""

    asyncio.run(run())


def test_admin_says_how_it_is_flushes_and_aborts() -> None:
    async def run() -> None:
        engine = ScriptedEngine(WORDS)
        service = Service(engine, WORDS, Template(), model="test")
        config = Config(api_key=(KEY,))
        public, admin = make_app(service, config), make_app(service, config, admin=True)
        engine.gate.clear()
        asked = [
            asyncio.create_task(call(public, "POST", "/v1/completions", {"prompt": "x"}, BEARER))
            for _ in range(2)
        ]
        while len(engine.live) < 2:
            await asyncio.sleep(0)
        info = (await call(admin, "GET", "/server_info")).json()
        assert len(info["live"]) == 2 and info["plan"] and KEY not in json.dumps(info)
        stopped = await call(admin, "POST", "/abort", {"id": "cmpl-" + info["live"][0]})
        assert stopped.json() == {"aborted": 1} and len(engine.aborted) == 1
        assert (await call(admin, "POST", "/abort", {"id": "0" * 32})).json() == {"aborted": 0}
        for bad in ({"id": "x"}, {}, {"id": 1}, {"all": 1}, {"every": True}, None):
            assert is_refusal(400, (await call(admin, "POST", "/abort", bad)).content)
        assert (await call(admin, "POST", "/abort", {"all": True})).json() == {"aborted": 1}
        for done in await asyncio.gather(*asked):
            assert is_refusal(done.status, done.content) == "aborted"
        assert (await call(admin, "POST", "/flush_cache")).json() == {"flushed": True}
        assert engine.commands == ["flush"] and not engine.live

    asyncio.run(run())


def test_health_and_readiness_say_what_is_wrong() -> None:
    async def run() -> None:
        app, service, engine = face()
        engine.health.ok, engine.health.reason = False, "no heartbeat for 3.0 s"
        found = await call(app, "GET", "/health")
        assert found.status == 503
        assert found.json() == {"status": "failing", "reason": "no heartbeat for 3.0 s"}
        found = await call(app, "GET", "/ready")
        assert found.status == 503 and b"no heartbeat" in found.content and found.headers["retry-after"]
        engine.health.reason = 'File "/work/x.py", line 3: dead at 0x7f00'
        assert b"work" not in (await call(app, "GET", "/health")).content
        engine.health.ok, engine.health.reason = True, "serving"
        ready, engine.ready = engine.ready, None
        for path in ("/ready", "/v1/models"):
            found = await call(app, "GET", path)
            assert is_refusal(found.status, found.content) == "not_ready"
        engine.ready = ready
        service.draining = True
        found = await call(app, "POST", "/v1/completions", {"prompt": "x"})
        assert found.status == 503 and is_refusal(503, found.content) == "shutting_down"
        assert (await call(app, "GET", "/ready")).status == 503
        assert (await call(app, "GET", "/health")).status == 200

    asyncio.run(run())


def test_a_wrong_key_at_any_time_leaves_victims_alone() -> None:
    async def run() -> None:
        app = app_of()
        async with victims(app, BEARER):
            for _ in range(50):
                done = await call(
                    app, "POST", "/v1/completions", b"x" * 100_000, {"authorization": "Bearer x"}
                )
                assert done.status == 401 and done.headers["connection"] == "close", "the body is not read"

    asyncio.run(run())


def test_the_catalogue_names_no_file_and_has_openais_types() -> None:
    for code, entry in CATALOGUE.items():
        assert 400 <= entry.status < 600 and code.replace("_", "").isalpha()
        assert entry.type in ("invalid_request_error", "rate_limit_error", "server_error")
        assert (entry.type == "server_error") >= (entry.status >= 500)
