"""The adapters API: texts, statuses, order of checks, paging, and that a refused call changes nothing."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest

from engine.adapters.failures import AdapterCode, AdapterFailure
from inference.errors import Unavailable
from management.snapshot import AdapterEntry
from tests.unit.dialects.djl.models import Djl
from tests.unit.fake_worker import settle
from tests.unit.scripts import Gate, Script, ids, model_info
from tests.waiting import eventually

BAD = "BadRequestException"
PINNED = AdapterFailure(AdapterCode.PINNED_SLOTS, {"limit": 7, "slots": 8})
RANK = AdapterFailure(AdapterCode.RANK, {"tensor": "a", "limit": 64, "rank": 512})
FORMS = ("/adapters", "/models/demo/adapters")


@pytest.fixture
def files(djl):
    """Files of two adapters."""
    for name in ("a1", "a2"):
        djl.registry.files[f"/a/{name}"] = AdapterEntry(name, f"digest-{name}", f"/store/{name}", 1)
    return djl


@pytest.mark.parametrize("base", FORMS)
async def test_register_describe_list_update_unregister(files, base):
    answer = await files.post(f"{base}?name=a1&src=/a/a1&echooption=opt")
    assert (answer.status, answer.text) == (200, '{\n  "status": "Adapter a1 registered"\n}\n')
    described = {"name": "a1", "src": "/a/a1", "preload": True, "pin": False}
    assert (await files.get(f"{base}/a1")).json() == described
    assert (await files.get(base)).json() == {"adapters": [described]}
    assert files.registry.deployed["demo"].adapters[0].options == (("echooption", "opt"),)
    answer = await files.post(f"{base}/a1/UPDATE?pin=true")
    assert (answer.status, answer.json()) == (200, {"status": "Adapter a1 updated"})
    assert (await files.get(f"{base}/a1")).json() == {**described, "pin": True}
    answer = await files.call("DELETE", f"{base}/a1")
    assert (answer.status, answer.json()) == (200, {"status": "Adapter a1 unregistered"})
    assert (await files.get(base)).json() == {"adapters": []}
    await files.refused("GET", f"{base}/a1", 404, BAD, "The adapter a1 was not found")


async def test_every_answer_has_the_headers(files):
    for answer in (await files.get("/adapters", x_request_id="mine"), await files.get("/none", x_request_id="mine")):
        assert answer.header("x-request-id") == "mine"
        assert answer.header("pragma") == "no-cache"
        assert answer.header("cache-control") == "no-cache; no-store, must-revalidate, private"
        assert answer.header("expires") == "Thu, 01 Jan 1970 00:00:00 UTC"
    assert answer.json() == {
        "code": 404,
        "type": "ResourceNotFoundException",
        "message": "Requested resource is not found, please refer to API document.",
    }


async def test_a_json_body_gives_what_the_query_lacks(files):
    body = {"name": "a1", "src": "/a/a1", "preload": False, "pin": False, "note": 7, "nothing": None}
    assert (await files.post("/adapters?name=a2", body)).json() == {"status": "Adapter a2 registered"}
    assert (await files.get("/adapters/a2")).json() == {"name": "a2", "src": "/a/a1", "preload": False, "pin": False}
    assert dict(files.registry.deployed["demo"].adapters[0].options) == {"note": "7", "nothing": "", "preload": "false"}


async def test_plain_text_for_clients_that_accept_only_that(files):
    answer = await files.post("/adapters", {"name": "a1", "src": "/a/a1"}, accept="text/plain")
    assert (answer.text, answer.header("content-type")) == ("Adapter a1 registered", "text/plain; charset=utf-8")
    answer = await files.call("DELETE", "/adapters/a1", accept="text/plain, application/json")
    assert answer.json() == {"status": "Adapter a1 unregistered"}


async def test_an_alias_is_only_shown(files):
    alias = {"x_amzn_sagemaker_adapter_alias": "nice"}
    assert (await files.post("/adapters?name=a1&src=/a/a1", **alias)).json() == {"status": "Adapter nice registered"}
    assert (await files.get("/adapters/a1", **alias)).json()["name"] == "a1"
    assert (await files.post("/adapters/a1/update", **alias)).json() == {"status": "Adapter nice updated"}
    assert (await files.call("DELETE", "/adapters/a1", **alias)).json() == {"status": "Adapter nice unregistered"}
    for method, path in (("GET", "/adapters/a1"), ("POST", "/adapters/a1/update"), ("DELETE", "/adapters/a1")):
        await files.refused(method, path, 404, BAD, "The adapter nice was not found", **alias)


async def test_load_is_a_former_name_of_preload(files):
    assert (await files.post("/adapters?name=a1&src=/a/a1&load=false")).status == 200
    assert (await files.get("/adapters/a1")).json()["preload"] is False
    assert (await files.post("/adapters/a1/update?load=true")).status == 200
    assert (await files.get("/adapters/a1")).json()["preload"] is True
    assert files.registry.deployed["demo"].adapters[0].options == (("preload", "true"),)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "adapters"),
        ("POST", "adapters"),
        ("POST", "adapters?name=a1"),
        ("GET", "adapters/a1"),
        ("POST", "adapters/a1/update?src=x"),
        ("DELETE", "adapters/a1"),
        ("GET", "adapters?limit=x"),
    ],
)
async def test_the_model_is_checked_first(djl, method, path):
    await djl.refused(method, f"/models/none/{path}", 404, BAD, "The model none was not found")


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", ""), ("GET", "/x"), ("POST", "/x/update")])
async def test_then_whether_the_model_takes_adapters(start, method, path):
    djl = Djl(await start(info=model_info(max_adapter_rank=0)))
    await djl.refused(method, f"/models/demo/adapters{path}", 400, BAD, "LoRA is not enabled.")


@pytest.mark.parametrize(
    ("query", "status", "kind", "message"),
    [
        ("", 400, BAD, "The parameter name is required"),
        ("name=", 400, BAD, "The parameter name is required"),
        ("src=/a/a1", 400, BAD, "The parameter name is required"),
        ("name=a1", 400, BAD, "The parameter src is required"),
        ("name=a1&src=s3://b/a", 409, "IllegalArgumentException", "URL adapters are not currently supported"),
        ("name=a1&src=https:x", 409, "IllegalArgumentException", "URL adapters are not currently supported"),
        ("name=a1&src=file://else/a", 409, "IllegalArgumentException", "URL adapters are not currently supported"),
        ("name=a1&src=/no", 424, BAD, "Only local LoRA models are supported. /no is not a valid path"),
        ("name=a1&src=/no&preload=false&pin=true", 424, BAD,
         "Only local LoRA models are supported. /no is not a valid path"),
        ("name=a1&src=/a/a1&preload=false&pin=true", 424, BAD, "Can not set preload to false and pin to true"),
        ("name=a1&src=/a/a1&pin=maybe", 400, BAD, "The parameter pin must be true or false"),
        ("name=demo&src=/a/a1", 409, "IllegalArgumentException",
         "The name demo is the name of a model. Choose another name for the adapter."),
    ],
)  # fmt: skip
async def test_what_cannot_be_registered(files, query, status, kind, message):
    await files.refused("POST", f"/models/demo/adapters?{query}", status, kind, message)
    assert await files.adapters() == []


async def test_a_name_with_a_slash(djl):
    await djl.has("team/a1")
    assert (await djl.get("/adapters/team/a1")).json()["name"] == "team/a1"
    assert (await djl.post("/models/demo/adapters/team/a1/update?pin=true")).status == 200
    await djl.refused("GET", "/adapters/team", 404, BAD, "The adapter team was not found")
    assert (await djl.call("DELETE", "/models/demo/adapters/team/a1")).status == 200
    assert await djl.adapters() == []


async def test_a_file_url_is_a_path(files):
    assert (await files.post("/adapters?name=a1&src=file:///a/a%2531")).status == 200
    assert (await files.get("/adapters/a1")).json()["src"] == "file:///a/a%31"
    assert (await files.post("/adapters/a1/update?src=file:///a/a%2531&pin=true")).status == 200


async def test_a_name_twice(files):
    await files.post("/adapters?name=a1&src=/a/a1")
    before = len(files.worker.commands)
    text = (
        "The adapter a1 already exists. If you want to replace it, please unregistering before registering a new adapter "
        "with the same name."
    )
    await files.refused("POST", "/adapters?name=a1&src=/a/a2&pin=true", 409, "IllegalArgumentException", text)
    assert await files.adapters() == [{"name": "a1", "src": "/a/a1", "preload": True, "pin": False}]
    assert len(files.worker.commands) == before


@pytest.mark.parametrize(
    ("action", "failure", "status", "words"),
    [
        ("load", RANK, 424, "Adapter a1 cannot be served: a: the rank must be between 1 and 64, got 512"),
        ("pin", PINNED, 507, "No free lora slots for adapter a1: at most 7 of 8 slots can be pinned"),
        ("load", AdapterFailure(AdapterCode.CACHE_IN_USE), 507,
         "No free lora slots for adapter a1: every adapter in the cache is in use"),
        ("load", AdapterFailure(AdapterCode.LOAD_FAILED, {"reason": "MemoryError"}), 507,
         "Not enough memory for adapter a1: it cannot be loaded: MemoryError"),
        ("load", AdapterFailure(AdapterCode.LOAD_FAILED, {"reason": "OSError"}), 424,
         "Adapter a1 cannot be served: it cannot be loaded: OSError"),
    ],
)  # fmt: skip
async def test_what_a_worker_refuses_is_not_registered(files, action, failure, status, words):
    files.worker.replies[action] = failure
    await files.refused("POST", "/adapters?name=a1&src=/a/a1&pin=true", status, BAD, words)
    assert await files.adapters() == []
    files.worker.replies.clear()
    assert (await files.post("/adapters?name=a1&src=/a/a1&pin=true")).status == 200


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("src=/a/a2", "Updating adapter path is not supported."),
        ("src=/a/a2&pin=true", "Updating adapter path is not supported."),
        ("preload=false&pin=true", "Can not set load to false and pin to true"),
        ("pin=false&preload=true",
         "Unpinning adapter is not supported. To unpin adapter 'a1', please delete the adapter and re-register it without "
         "pinning."),
        ("preload=false", "Can not set load to false and pin to true"),
    ],
)  # fmt: skip
async def test_updates_that_cannot_be(files, query, message):
    await files.post("/adapters?name=a1&src=/a/a1&pin=true")
    before = await files.adapters()
    await files.refused("POST", f"/adapters/a1/update?{query}", 424, BAD, message)
    assert await files.adapters() == before


async def test_a_failed_update_leaves_the_adapter(files):
    await files.post("/adapters?name=a1&src=/a/a1")
    before = await files.adapters()
    files.worker.replies["pin"] = PINNED
    text = "No free lora slots for adapter a1: at most 7 of 8 slots can be pinned"
    await files.refused("POST", "/adapters/a1/update?pin=true&more=1", 507, BAD, text)
    assert await files.adapters() == before
    assert files.registry.deployed["demo"].adapters[0].options == ()


async def test_updates_keep_what_they_leave_out(files):
    await files.post("/adapters?name=a1&src=/a/a1&preload=false&one=1&two=2")
    assert (await files.post("/adapters/a1/update?two=3&src=/a/a1")).status == 200
    assert (await files.get("/adapters/a1")).json() == {"name": "a1", "src": "/a/a1", "preload": False, "pin": False}
    assert dict(files.registry.deployed["demo"].adapters[0].options) == {"one": "1", "two": "3", "preload": "false"}
    await files.refused("POST", "/adapters/a1/update?pin=true", 424, BAD, "Can not set load to false and pin to true")
    assert (await files.post("/adapters/a1/update?preload=true&pin=true")).status == 200


async def test_what_cannot_be_recorded_is_not_pinned(files, monkeypatch):
    async def fail(*args, **kwargs):
        raise Unavailable("the registry cannot be reached")

    monkeypatch.setattr(files.registry, "register_adapter", fail)
    assert (await files.post("/adapters?name=a1&src=/a/a1&pin=true")).status == 503
    assert [command.action for command in files.worker.commands] == ["load", "pin", "unpin", "unload"]
    monkeypatch.undo()
    assert (await files.post("/adapters?name=a1&src=/a/a1")).status == 200
    files.worker.commands.clear()
    monkeypatch.setattr(files.registry, "change_adapter", fail)
    assert (await files.post("/adapters/a1/update?pin=true")).status == 503
    # The registry's wish to preload it is carried out meanwhile.
    assert [c.action for c in files.worker.commands if c.action != "load"] == ["pin", "unpin"]


async def test_an_adapter_that_came_another_way_can_be_pinned(files):
    files.registry.deployed["demo"].adapters.append(AdapterEntry("a1", "digest-a1", "/store/a1", 1, source="/a/a1"))
    files.registry.publish()
    assert await files.adapters() == [{"name": "a1", "src": "/a/a1", "preload": False, "pin": False}]
    await eventually(lambda: files.serving.router.resolve("demo").entry.adapters)
    assert (await files.post("/adapters/a1/update?pin=true")).status == 200
    assert await files.adapters() == [{"name": "a1", "src": "/a/a1", "preload": True, "pin": True}]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_other_methods(djl, method):
    text = "Requested method is not allowed, please refer to API document."
    for path in ("/adapters", "/adapters/a1", "/models/demo/adapters"):
        await djl.refused(method, path, 405, "MethodNotAllowedException", text)
    await djl.refused("POST", "/adapters/a1/replace", 405, "MethodNotAllowedException", text)
    await djl.refused("POST", "/adapters/a1", 405, "MethodNotAllowedException", text)


@pytest.mark.parametrize(
    ("query", "names", "token"),
    [
        ("", 5, None),
        ("limit=2", 2, "2"),
        ("limit=2&next_page_token=2", 2, "4"),
        ("limit=2&next_page_token=4", 1, None),
        ("limit=5", 5, None),
        ("limit=0", 0, "0"),
        ("limit=101", 5, None),
        ("limit=-1&next_page_token=-7", 5, None),
        ("next_page_token=5", 0, None),
        ("next_page_token=2000000000", 0, None),
        ("limit=%2B1", 1, "1"),
        ("limit=1&limit=x", 1, "1"),
        ("limit=&next_page_token=", 5, None),
    ],
)
async def test_pages(djl, query, names, token):
    await djl.has("b", "a", "e", "d", "c")
    answer = (await djl.get(f"/adapters?{query}")).json()
    assert (len(answer["adapters"]), answer.get("nextPageToken")) == (names, token)
    if not query:
        assert [each["name"] for each in answer["adapters"]] == ["b", "a", "e", "d", "c"]


@pytest.mark.parametrize("value", ["x", "1.0", "1e2", "0x1", "٣", "9" * 30, "2147483648", " 1", "--1"])
@pytest.mark.parametrize("name", ["limit", "next_page_token"])
async def test_pages_that_are_no_integers(djl, name, value):
    text = f'For input string: "{value}"'
    await djl.refused("GET", f"/adapters?{name}={quote(value)}", 409, "NumberFormatException", text)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("&".join(f"p{i}=1" for i in range(70)), None, "at most 64 parameters"),
        ("name=%ff&src=/a", None, "encoded as UTF-8"),
        (f"name=a1&src={'x' * 5000}", None, "longer than 4096"),
        ("name=a1&src=/a/a1&note=%00", None, "no NUL"),
        ("name=a1&src=/a/a1", b'{"no\\u0000te": "x"}', "no NUL"),
        ("name=a1", b"{", "JSON"),
        ("name=a1", b'{"src": ["/a"]}', "The parameter src must be a text"),
        ("name=a1", b"[" * 500, "JSON object"),
        ("name=a1", b'{"src": "' + b"x" * 5000 + b'"}', "longer than 4096"),
    ],
)
async def test_parameters_that_cannot_be(files, path, body, words):
    headers = {"content_type": "application/json"} if body else {}
    answer = await files.post(f"/adapters?{path}", body, **headers)
    assert (answer.status, answer.json()["code"], answer.json()["type"]) == (400, 400, BAD)
    assert words in answer.json()["message"] or words == "JSON object"
    assert await files.adapters() == []


async def test_a_body_of_another_kind_is_ignored(files):
    answer = await files.post("/adapters?name=a1&src=/a/a1", b"\xff\xfe", content_type="application/octet-stream")
    assert answer.status == 200


async def test_without_a_startup_model_there_must_be_a_prefix(djl):
    text = "The adapter must be prefixed with a model unless there is only a single startup model used."
    djl.registry.deployed["demo"].is_default = False
    djl.registry.publish()
    assert await djl.adapters("/adapters") == []  # the only one
    djl.registry.add("other", [])
    await djl.refused("GET", "/adapters", 400, BAD, text)
    await djl.refused("POST", "/adapters", 400, BAD, text)


async def test_what_else_is_deployed_does_not_change_the_startup_model(djl):
    await djl.has("a1")
    djl.registry.add("other", [])
    djl.registry.add("later", [], vendor_fields={"djl": {}})
    assert [adapter["name"] for adapter in await djl.adapters("/adapters")] == ["a1"]
    assert (await djl.post("/invocations", {"inputs": "Hello"})).status == 200


async def test_models_without_workers(djl):
    djl.registry.add("resting", [], state="stopped")
    answer = await djl.get("/models/resting/adapters")
    assert (answer.status, answer.json()["type"]) == (503, "ServiceUnavailableException")
    assert "Scale it up" in answer.json()["message"]


async def test_unregistered_while_in_use(djl):
    await djl.has("a1")
    gate = Gate()
    djl.worker.scripts.append(Script(tokens=[*ids("Ahoy there"), 2], gate_after=1, gate=gate))
    running = djl.serving.begin("/predictions/demo?adapter=a1", {"inputs": "Hello"}, plane="djl")
    await eventually(lambda: djl.worker.submits)
    assert (await djl.call("DELETE", "/adapters/a1")).status == 200
    assert (await djl.post("/predictions/demo?adapter=a1", {"inputs": "Hello"})).status == 424
    gate.open()
    assert (await running.end()).json() == {"generated_text": "Ahoy there"}
    assert djl.worker.submits[0].adapter.digest == "digest-a1"


async def test_the_reason_of_a_failed_load_is_shown(djl, monkeypatch):
    await djl.has("a1")
    monkeypatch.setattr(djl.services.adapters, "failures", lambda base: {"digest-a1": RANK})
    shown = (await djl.get("/adapters/a1")).json()
    assert (shown["status"], shown["reason"]) == ("FAILED", "a: the rank must be between 1 and 64, got 512")
    assert await djl.adapters("/adapters") == [shown]


async def test_registered_at_once_under_one_name(files):
    paths = [f"/adapters?name=a1&src=/a/a{number}" for number in (1, 2, 1, 2)]
    answers = await asyncio.gather(*(files.post(path) for path in paths))
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
    assert len(await files.adapters()) == 1


async def test_an_update_of_one_that_is_unregistered_at_once(djl, monkeypatch):
    """Both have found the adapter; the update waits for its end."""
    await djl.has("a1")
    gate, remove = asyncio.Event(), djl.services.registry.remove_adapter

    async def slowly(*args):
        await gate.wait()
        await remove(*args)

    monkeypatch.setattr(djl.services.registry, "remove_adapter", slowly)
    removal = asyncio.ensure_future(djl.call("DELETE", "/adapters/a1"))
    await settle()
    update = asyncio.ensure_future(djl.post("/adapters/a1/update?pin=true"))
    await settle()
    gate.set()
    assert (await removal).status == 200
    assert (await update).status == 404
    assert (await update).json()["message"] == "The adapter a1 was not found"
