"""Who may call: keys with scopes, names of the server, pages of other sites; and what is answered before a body is read."""

from __future__ import annotations

import time

import pytest

from inference.errors import BodyTooLarge, MalformedBody
from inference.http.auth import Credentials
from inference.http.sites import Sites
from management.snapshot import ApiKeyEntry, KeyLimits, hash_key

ASK = {"prompt": "The capital", "model": "demo", "max_tokens": 1}
PATH = "/v1/completions"
KEYS = {"infer": "k1.secret", "metrics": "k2.secret", "manage": "k3.secret", "expired": "k4.secret"}


def entry(scope: str, text: str) -> ApiKeyEntry:
    expires = time.time() - 1 if scope == "expired" else None
    scopes = frozenset({"infer"} if scope == "expired" else {scope})
    return ApiKeyEntry(text.partition(".")[0], scope, hash_key(text), scopes, expires)


@pytest.fixture
async def guarded(start):
    serving = await start(api_key_required=True)
    serving.keys = {text.partition(".")[0]: entry(scope, text) for scope, text in KEYS.items()}
    serving.publish()
    return serving


def bearer(scope: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[scope]}"}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer k1.wrong", "Bearer k9.secret",
                                    "Basic k1.secret", "Bearer k4.secret", "k1.secret"])  # fmt: skip
@pytest.mark.parametrize(("plane", "path", "body"), [
    ("front", PATH, ASK), ("front", "/generate", {"inputs": "a"}), ("front", "/v2/models/demo/generate", {}),
    ("mindie", "/infer", {"inputs": "a"}),
])  # fmt: skip
async def test_without_a_good_key(guarded, plane, path, body, header):
    headers = {} if header is None else {"authorization": header}
    answer = await guarded.post(path, body, plane=plane, **headers)
    assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
    assert not guarded.worker.submits


@pytest.mark.parametrize(("scope", "method", "path", "plane"), [
    ("infer", "POST", PATH, "front"), ("infer", "GET", "/v1/models", "front"), ("metrics", "GET", "/metrics", "front"),
    ("manage", "POST", "/v1/load_lora_adapter", "front"), ("manage", "GET", "/info", "management"),
])  # fmt: skip
async def test_a_key_opens_what_its_scope_says(guarded, scope, method, path, plane):
    for given in ("infer", "metrics", "manage"):
        call = guarded.begin(path, ASK if method == "POST" else None, method=method, plane=plane, **bearer(given))
        assert ((await call.end()).status == 403) == (given != scope)


@pytest.mark.parametrize("headers", [
    {"x_api_key": KEYS["infer"]}, {"authorization": "Bearer dummy", "x_api_key": KEYS["infer"]},
    {"authorization": f"Bearer {KEYS['infer']}", "x_api_key": "dummy"}, {"authorization": f"bearer {KEYS['infer']}"},
])  # fmt: skip
@pytest.mark.parametrize(("plane", "path", "body"), [
    ("front", PATH, ASK), ("front", "/generate", {"inputs": "a"}), ("mindie", "/infer", {"inputs": "a"}),
])  # fmt: skip
async def test_a_key_is_found_in_either_header(guarded, plane, path, body, headers):
    assert (await guarded.post(path, body, plane=plane, **headers)).status == 200


async def test_of_two_known_keys_the_bearers_counts(guarded):
    answer = await guarded.post(PATH, ASK, **bearer("metrics"), x_api_key=KEYS["infer"])
    assert answer.status == 403


@pytest.fixture
async def open_to_all(start):
    """A server that asks for no keys and knows some."""
    serving = await start()
    limited = ApiKeyEntry(
        "k1", "alice", hash_key(KEYS["infer"]), frozenset({"infer"}), None, limits=KeyLimits(requests_per_minute=1)
    )
    serving.keys = {"k1": limited, "k2": entry("metrics", KEYS["metrics"]), "k4": entry("expired", KEYS["expired"])}
    serving.publish()
    return serving


async def test_a_key_counts_where_none_is_required(open_to_all):
    first = await open_to_all.post(PATH, {**ASK, "cache_salt": "s"}, **bearer("infer"))
    assert (first.status, first.header("x-ratelimit-remaining-requests")) == (200, "0")
    assert open_to_all.worker.submits[0].cache_salt == "k1:s"
    assert (await open_to_all.post(PATH, ASK, **bearer("infer"))).status == 429
    assert (await open_to_all.post(PATH, ASK)).status == 200


@pytest.mark.parametrize("given", ["dummy", "k1.wrong", KEYS["expired"], KEYS["metrics"]])
async def test_a_key_that_opens_nothing_is_as_none_where_none_is_required(open_to_all, given):
    asked = {**ASK, "cache_salt": "s"}
    answers = [await open_to_all.post(PATH, asked, **headers) for headers in ({}, {"authorization": f"Bearer {given}"})]
    assert [(a.status, a.header("x-ratelimit-remaining-requests")) for a in answers] == [(200, None)] * 2
    without, presented = open_to_all.worker.submits
    assert presented.cache_salt == without.cache_salt


def test_credentials_are_not_printed():
    assert "secret" not in repr(Credentials("Bearer k1.secret", "k2.secret"))


async def test_the_key_keeps_prompts_of_tenants_apart(guarded):
    assert (await guarded.post(PATH, {**ASK, "cache_salt": "s"}, **bearer("infer"))).status == 200
    assert guarded.worker.submits[0].cache_salt == "k1:s"


async def test_one_tenant_may_not_hold_every_place(start):
    serving = await start(api_key_required=True, max_concurrent_requests=8, max_requests_per_tenant=1)
    serving.keys = {"k1": entry("infer", "k1.secret"), "k2": entry("infer", "k2.secret")}
    serving.publish()
    with serving.services.admission.permit("k1"):
        assert (await serving.post(PATH, ASK, authorization="Bearer k1.secret")).status == 429
        assert (await serving.post(PATH, ASK, authorization="Bearer k2.secret")).status == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/v2/health/live", "/docs", "/openapi.json"])
async def test_what_is_open_to_everybody(guarded, path):
    assert (await guarded.get(path)).status == 200


def previewed(serving, method, path, **headers):
    given = {name.replace("_", "-").encode(): value.encode() for name, value in {"host": "x", **headers}.items()}
    return serving.planes["front"].preview(method, path, given)


async def test_what_headers_decide_is_answered_before_the_body(guarded):
    assert previewed(guarded, "POST", PATH).status == 401
    assert previewed(guarded, "POST", PATH, **bearer("metrics")).status == 403
    assert previewed(guarded, "POST", PATH, **bearer("infer")) is None
    assert previewed(guarded, "POST", "/nothing", **bearer("infer")).status == 404
    assert previewed(guarded, "POST", "/v1/models", **bearer("infer")).status == 405
    assert previewed(guarded, "POST", PATH, **bearer("infer"), origin="https://evil.example").status == 403
    headers = dict(previewed(guarded, "POST", PATH, x_request_id="mine").headers)
    assert headers[b"x-request-id"] == b"mine"


async def test_a_full_server_is_told_of_before_the_body(start):
    serving = await start(max_concurrent_requests=1)
    plane, headers = serving.planes["front"], {b"host": b"x"}
    assert plane.overloaded("POST", PATH, headers) is None
    with serving.services.admission.permit():
        assert plane.overloaded("POST", PATH, headers).status == 503
        assert plane.overloaded("POST", "/generate_stream", headers) is None  # it answers 200 whatever happens
        assert plane.overloaded("GET", "/v1/models", headers) is None
        assert plane.overloaded("POST", "/nothing", headers).status == 404
        mindie = serving.planes["mindie"]
        assert mindie.overloaded("POST", "/infer", headers).status == 503
    serving.services.admission.draining = True
    assert plane.overloaded("POST", PATH, headers).status == 503


async def test_what_the_server_itself_turned_down_is_told_as_the_dialect_does(serving):
    for plane, path, status in (("front", PATH, 413), ("front", "/generate", 413), ("mindie", "/infer", 413)):
        response = serving.planes[plane].refuse("POST", path, BodyTooLarge(10), {})
        assert response.status == status
    assert serving.planes["front"].refuse("POST", PATH, MalformedBody("one Host"), {}).status == 400


async def test_pages_of_allowed_sites_can_read_what_the_server_itself_turned_down(start):
    serving = await start(sites=Sites(origins=frozenset({"https://good.example"})))
    for origin, seen in ((b"https://good.example", True), (b"https://bad.example", False)):
        answer = serving.planes["front"].refuse("POST", PATH, BodyTooLarge(10), {b"origin": origin})
        assert ((b"access-control-allow-origin", origin) in answer.headers) is seen


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "box", "a.localhost", "own.example",
                                  "OWN.example.", "sub.below.example", "below.example"])  # fmt: skip
async def test_own_names(start, host):
    serving = await start(sites=Sites(frozenset({"own.example", ".below.example"})))
    assert (await serving.get("/health", host=host)).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "own.example.evil.com", "xown.example", "notbelow.example", "a b", ""]
)
async def test_foreign_names(start, host):
    serving = await start(sites=Sites(frozenset({"own.example", ".below.example"})))
    assert (await serving.post(PATH, ASK, host=host)).status == 403
    assert not serving.worker.submits


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"origin": "null"},
                                     {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}])  # fmt: skip
async def test_pages_of_other_sites_change_nothing(serving, headers):
    assert (await serving.post(PATH, ASK, **headers)).status == 403
    assert (await serving.get("/v1/models", **headers)).status == 200
    assert (await serving.get("/stopService", plane="management", **headers)).status == 403
    assert (serving.worker.submits, serving.terminated) == ([], [])


@pytest.mark.parametrize("headers", [{"origin": "http://localhost"}, {"sec_fetch_site": "same-origin"},
                                     {"sec_fetch_site": "none"}, {"origin": "http://localhost", "host": "localhost:80"}])  # fmt: skip
async def test_own_pages(serving, headers):
    assert (await serving.post(PATH, ASK, **headers)).status == 200


async def test_sites_that_are_let_in(start):
    serving = await start(sites=Sites(origins=frozenset({"https://good.example"})))
    answer = await serving.post(PATH, ASK, origin="https://good.example")
    assert (answer.status, answer.header("access-control-allow-origin")) == (200, "https://good.example")
    ask = {"origin": "https://good.example", "access_control_request_method": "POST",
           "access_control_request_headers": "authorization"}  # fmt: skip
    preflight = await serving.begin(PATH, method="OPTIONS", **ask).end()
    assert (preflight.status, preflight.header("access-control-allow-methods")) == (200, "POST")
    assert preflight.header("access-control-allow-headers") == "authorization"
    refused = await serving.begin(PATH, method="OPTIONS", **{**ask, "origin": "https://evil.example"}).end()
    assert refused.header("access-control-allow-origin") is None


GOOD = {"origin": "https://good.example"}
STRICT = Sites(
    origins=frozenset({"https://good.example"}),
    methods=frozenset({"GET", "POST"}),
    headers=frozenset({"authorization"}),
    credentials=True,
)


@pytest.mark.parametrize(("method", "headers", "refused"), [
    ("POST", "authorization", ""), ("GET", "", ""), ("POST", "Authorization, Content-Type", ""),
    ("DELETE", "", "Disallowed CORS method"), ("post", "", "Disallowed CORS method"),
    ("POST", "x-mine", "Disallowed CORS headers"), ("PUT", "authorization,x-mine", "Disallowed CORS method, headers"),
])  # fmt: skip
@pytest.mark.parametrize("plane", ["front", "mindie"])
async def test_what_pages_of_a_site_may_send(start, plane, method, headers, refused):
    serving = await start(sites=STRICT)
    asked = {"access_control_request_method": method, "access_control_request_headers": headers}
    answer = await serving.begin("/any", method="OPTIONS", plane=plane, **GOOD, **asked).end()
    assert (answer.status, answer.text) == (400 if refused else 200, refused)
    assert answer.header("access-control-allow-methods") == "GET, POST"
    assert "authorization" in answer.header("access-control-allow-headers").split(", ")
    assert answer.header("access-control-allow-credentials") == "true"


@pytest.mark.parametrize("plane", ["front", "links"])
async def test_pages_of_a_site_can_read_early_refusals(start, plane):
    serving = await start(sites=STRICT, api_key_required=True)
    path = PATH if plane == "front" else f"/deployments/unknown{PATH}"
    given = {b"host": b"x", b"origin": b"https://good.example"}
    response = serving.planes[plane].preview("POST", path, given)
    assert dict(response.headers)[b"access-control-allow-origin"] == b"https://good.example"
    foreign = serving.planes[plane].preview("POST", path, {**given, b"origin": b"https://evil.example"})
    assert b"access-control-allow-origin" not in dict(foreign.headers)


@pytest.mark.parametrize(
    ("given", "kept"), [("abc", True), ("x" * 128, True), ("x" * 129, False), ("é", False), ("", False)]
)
async def test_request_ids(serving, given, kept):
    answer = await serving.post(PATH, ASK, x_request_id=given)
    assert (answer.header("x-request-id") == given) == kept
    assert answer.header("x-request-id")


async def test_a_key_of_the_settings_opens_inference_and_metrics(guarded):
    guarded.services.authenticator.__init__(True, ["mine", "k1.other"])
    for key, status in (
        ("mine", 200),
        ("k1.other", 200),
        (KEYS["infer"], 200),
        ("min", 401),
        ("mine2", 401),
        ("", 401),
    ):
        answer = await guarded.post(PATH, ASK, authorization=f"Bearer {key}")
        assert answer.status == status, key
    assert (await guarded.get("/metrics", authorization="Bearer mine")).status == 200
    refused = await guarded.post("/v1/unload_lora_adapter", {"lora_name": "a"}, authorization="Bearer mine")
    assert refused.status == 403


async def test_codes_of_responses_say_what_an_agent_can_do(guarded):
    """Codex stops at a quota, waits for a rate, and asks for another key."""
    path, body = "/v1/responses", {"input": "a", "model": "demo", "max_output_tokens": 1}
    refused = await guarded.post(path, body)
    assert (refused.status, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    for limits, code in (
        (KeyLimits(requests_per_minute=1), "rate_limit_exceeded"),
        (KeyLimits(tokens_per_day=1), "insufficient_quota"),
    ):
        limited = ApiKeyEntry("k1", "alice", hash_key(KEYS["infer"]), frozenset({"infer"}), None, limits=limits)
        guarded.keys = {"k1": limited}
        guarded.publish()
        answers = [await guarded.post(path, body, **bearer("infer")) for _ in range(3)]
        assert (answers[-1].status, answers[-1].json()["error"]["code"]) == (429, code)
