"""The tables of fields say what the server does: each value that they allow is taken, each that they do not is refused."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests import calls
from tests.conftest import ROOT
from tests.docs.field_tables import Page, Row, read
from tests.engine.test_embeddings import encoder
from tests.live import LiveServer

pytestmark = pytest.mark.full

DIALECTS = read((ROOT / "docs" / "dialects.md").read_text())
MINDIE = read((ROOT / "docs" / "mindie.md").read_text())
DJL = read((ROOT / "docs" / "djl.md").read_text())
PROMPT = "Question: What is the capital of Spain?\nAnswer:"
MESSAGES = [{"role": "user", "content": "What is the capital of Spain?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TEXT_PART = [{"type": "text", "text": PROMPT}]
VOLATILE = re.compile(r"id|created(_at)?|completed_at|.*_time.*|seed|response_id")
"""Keys whose values differ from answer to answer."""


@dataclass(frozen=True)
class Probe:
    """How a table is tried: a route, and a body that is answered.

    `values` has values for a field whose type alone does not make a good one, `beside` what a field needs beside it;
    None for a field that its own tests cover, because one request cannot show what it does.
    """

    page: Page
    table: str
    path: str
    body: dict[str, Any]
    values: dict[str, list[Any] | None] = field(default_factory=dict)
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    plane: str = "url"
    inside: str = ""
    """The object of the body that the fields are in, if the table does not say so."""


LINE = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "seed": 1}
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "seed": 1}
SAMPLED = {"temperature": 1, "seed": 1}
COMMON = {
    "model": ["demo"],
    "stream_options": [{"include_usage": True}],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "json", "value": SCHEMA}],
    "structured_outputs": [{"json": SCHEMA}, {"regex": "a"}, {"choice": ["a"]}, {"json_object": True}],
    "guided_json": [SCHEMA, json.dumps(SCHEMA)],
    "guided_regex": ["a", "a{3}"],
    "guided_grammar": ['start: "a"', 'root ::= "a"'],
    "kv_transfer_params": [{"do_remote_prefill": False}, {"do_remote_decode": True}],
}
FEW: dict[str, Any] = {"n": [1, 2], "best_of": [1, 2]}
"""MindIE's batch size bounds them further."""
SEVERAL = {"n": SAMPLED, "best_of": SAMPLED, "include_stop_str_in_output": {"stop": "no such text"}}
HOT = {"parameters.temperature": {"do_sample": True, "seed": 1}}
"""A temperature alone samples, and with a seed of the server's making."""
STREAMED = {"stream_options": {"stream": True}}
PROBES = [
    Probe(DIALECTS, "sampling-fields-of-vllm", "/v1/completions", LINE, {"logit_bias": [{"5": 1}]},
          {"n": SAMPLED, "max_tokens": {"min_tokens": 0}}),
    Probe(DIALECTS, "sampling-fields-of-vllm", "/generate", LINE, {"logit_bias": [{"5": 1}]}, {"n": SAMPLED}),
    Probe(DIALECTS, "sampling-fields-of-vllm", "/v1/chat/completions", CHAT, {"logit_bias": [{"5": 1}]}, {"n": SAMPLED}),
    Probe(DIALECTS, "fields-of-completions-and-chats", "/v1/completions", LINE, COMMON,
          STREAMED | {"logprob_token_ids": {"logprobs": 1}}),
    Probe(DIALECTS, "fields-of-completions-and-chats", "/v1/chat/completions", CHAT, COMMON,
          STREAMED | {"logprob_token_ids": {"logprobs": True}}),
    Probe(DIALECTS, "fields-of-completions", "/v1/completions", LINE, {}, {"best_of": SAMPLED}),
    Probe(
        DIALECTS, "fields-of-chats", "/v1/chat/completions", CHAT,
        {"messages": [MESSAGES], "tools": [[TOOL]], "tool_choice": ["none", "auto"], "modalities": [["text"]],
         "documents": [[{"text": "x"}]], "chat_template_kwargs": [{"a": 1}]},
        {"top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]},
         "continue_final_message": {"add_generation_prompt": False}},
    ),
    Probe(
        DIALECTS, "fields-of-responses", "/v1/responses", {"input": PROMPT, "max_output_tokens": 4, "temperature": 0, "seed": 1},
        {"input": [PROMPT, MESSAGES], "model": ["demo"], "metadata": [{"a": "b"}], "tools": [[FLAT_TOOL]],
         "tool_choice": ["none"], "text": [{"format": {"type": "text"}}], "reasoning": [{"effort": "low"}],
         "include": [["message.output_text.logprobs"]], "top_logprobs": [0, 20], "logit_bias": [{"5": 1}],
         "structured_outputs": [{"regex": "a"}], "previous_response_id": None},
        {"tool_choice": {"tools": [FLAT_TOOL]}, "top_logprobs": {"include": ["message.output_text.logprobs"]}},
    ),
    Probe(DIALECTS, "fields-of-tokenize", "/tokenize", {"prompt": PROMPT},
          {"model": ["demo"], "messages": None, "tools": [[TOOL]]}),
    Probe(DIALECTS, "fields-of-detokenize", "/detokenize", {"tokens": [5]}, {"model": ["demo"]}),
    Probe(DIALECTS, "fields-of-vllms-generate", "/generate", LINE, {"model": ["demo"]}),
    Probe(DIALECTS, "fields-of-the-routers-generate", "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}},
          {"parameters.grammar": [{"type": "json", "value": SCHEMA}, {"type": "regex", "value": "a"}],
           "parameters.adapter_id": ["demo"]},
          {"parameters.best_of": {"do_sample": True, "top_k": 1}}),
    Probe(DIALECTS, "fields-of-the-routers-root", "/", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}),
    Probe(DIALECTS, "fields-of-chat_tokenize", "/chat_tokenize", {"messages": MESSAGES},
          {"messages": [MESSAGES], "model": ["demo"], "tools": [[TOOL]]}),
    Probe(DIALECTS, "fields-of-vertex", "/vertex", {"instances": [{"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}]},
          {"instances": [[{"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}]]}),
    Probe(DIALECTS, "fields-of-tritons-generate", "/v2/models/demo/generate",
          {"text_input": PROMPT, "max_tokens": 4, "temperature": 0, "seed": 1}, {"stream": [False]}),
    Probe(DIALECTS, "parameters-of-an-inference", "/v2/models/demo/generate", {"text_input": PROMPT, "temperature": 0},
          {"lora_name": ["json"], "sampling_parameters": ['{"seed": 1}'], "streaming": [False], "beam_width": [1, 2],
           "structured_outputs": [json.dumps({"regex": "a"})], "guided_decoding": [json.dumps({"regex": "a"})],
           "guided_decoding_guide_type": ["json"], "guided_decoding_guide": ["a"]},
          {"num_return_sequences": SAMPLED, "temperature": {"seed": 1}, "guided_decoding_guide": {"guided_decoding_guide_type": "regex"}}),
    Probe(DIALECTS, "sampling-fields-of-vllm", "/v2/models/demo/generate",
          {"text_input": PROMPT, "parameters": {"max_tokens": 4, "temperature": 0, "seed": 1}},
          {"logit_bias": None, "n": None, "bad_words": None}, inside="parameters"),
    Probe(DIALECTS, "fields-of-the-repositorys-index", "/v2/repository/index", {}),
    Probe(DIALECTS, "trace-settings", "/v2/trace/setting", {},
          {"trace_level": [["OFF"]], "trace_rate": ["1000"], "trace_count": ["-1"], "log_frequency": ["0"]}),
    Probe(DIALECTS, "log-settings", "/v2/logging", {},
          {"log_info": [True], "log_warning": [True], "log_error": [True], "log_format": ["default"]}),
    Probe(MINDIE, "fields-of-tgi", "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}},
          {"inputs": [PROMPT, TEXT_PART]}, HOT, plane="mindie_url"),
    Probe(MINDIE, "fields-of-vllm", "/generate", LINE, {"prompt": [PROMPT, TEXT_PART], **FEW}, SEVERAL, plane="mindie_url"),
    Probe(MINDIE, "fields-of-openai", "/v1/completions", {**LINE, "model": "demo"},
          {"model": ["demo"], "response_format": [{"type": "json_object"}, {"type": "text"}], **FEW},
          SEVERAL, plane="mindie_url"),
    Probe(MINDIE, "fields-of-openai", "/v1/chat/completions", {**CHAT, "model": "demo"},
          {"model": ["demo"], "response_format": [{"type": "json_object"}, {"type": "text"}], **FEW},
          SEVERAL, plane="mindie_url"),
    Probe(MINDIE, "fields-of-chats", "/v1/chat/completions", {**CHAT, "model": "demo"},
          {"messages": [MESSAGES], "tools": [[TOOL]], "chat_template_kwargs": [{"enable_thinking": False}]},
          {"top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]}}, plane="mindie_url"),
    Probe(MINDIE, "fields-of-completions", "/v1/completions", {**LINE, "model": "demo"}, plane="mindie_url"),
    Probe(MINDIE, "fields-of-mindies-own-routes", "/infer", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}},
          {"inputs": [PROMPT, TEXT_PART]}, HOT, plane="mindie_url"),
    Probe(MINDIE, "fields-of-triton", "/v2/models/demo/generate", {"text_input": PROMPT, "parameters": {"max_new_tokens": 4}},
          {"text_input": [PROMPT, TEXT_PART]}, HOT, plane="mindie_url"),
    Probe(
        MINDIE, "fields-of-tensors", "/v2/models/demo/infer",
        {"inputs": [{"name": "i", "shape": [1, 1], "datatype": "UINT32", "data": [5]}], "outputs": [{"name": "o"}]},
        {"inputs": [[{"name": "i", "shape": [1, 1], "datatype": "UINT32", "data": [5]}]], "outputs": [[{"name": "o"}]]},
        plane="mindie_url",
    ),
    Probe(DJL, "fields-of-lmi", "/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}},
          {"parameters.best_of": [1], "parameters.num_beams": [1, 2]},
          {"parameters.n": {"do_sample": True, "temperature": 1.0, "seed": 1}, "parameters.decoder_input_details": {"details": True},
           "parameters.temperature": {"do_sample": True, "seed": 1}}, plane="djl_url"),
]  # fmt: skip
EMBEDDINGS = [
    Probe(DIALECTS, "fields-of-embeddings", "/v1/embeddings", {"input": "x"},
          {"model": None, "input": ["x", ["x"], [5], [[5]]], "messages": None, "dimensions": None}),
    Probe(DIALECTS, "fields-of-pooling", "/pooling", {"input": "x"}),
    Probe(DIALECTS, "fields-of-embed", "/embed", {"inputs": "x"}, {"prompt_name": None}),
]  # fmt: skip
ELSEWHERE = {
    "fields-of-load-and-unload",
    "fields-of-load_lora_adapter",
    "fields-of-unload_lora_adapter",
    "fields-of-tritons-infer",
}
"""Tables of what changes the registry, or is no JSON alone: tests/server and tests/dialects have their bounds."""


def names(probe: Probe) -> str:
    return f"{probe.plane.removesuffix('_url')}{probe.path} {probe.table}"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    live = LiveServer(folder / "var", model=str(encoder(folder, "bert"))).start()
    yield live
    assert live.stop() == 0, live.log


@pytest.mark.parametrize("probe", PROBES, ids=names)
def test_each_row_of_a_table_is_true(server, probe):
    assert not list(itertools.chain.from_iterable(untrue(server, probe, row) for row in probe.page.tables[probe.table]))


@pytest.mark.parametrize("probe", EMBEDDINGS, ids=names)
def test_each_row_of_an_embedding_table_is_true(embedder, probe):
    assert not list(
        itertools.chain.from_iterable(untrue(embedder, probe, row) for row in probe.page.tables[probe.table])
    )


def untrue(server: LiveServer, probe: Probe, row: Row):
    """A sentence for each thing that the row says and the server does not do."""
    wanted = probe.values.get(row.field, ())
    if wanted is None:
        return
    if row.refused:
        for value in (["x"], "x", {"x": "x"}, True):
            if not is_refusal(post(server, probe, row, value), row):
                yield f"{row.field}={value} is not refused"
        return
    for value in wanted or ("x",) if row.ignored else wanted or row.accepted():
        answer = post(server, probe, row, value)
        if answer.status_code != 200:
            yield f"{row.field}={str(value)[:80]} is refused: {answer.text[:300]}"
    for value in () if row.ignored else row.wrong():
        answer = post(server, probe, row, value)
        if not is_refusal(answer, row):
            yield f"{row.field}={str(value)[:80]} is not refused by name: {answer.status_code} {answer.text[:300]}"
    for value in row.default_values():
        with_it, without = post(server, probe, row, value), post(server, probe, row)
        if lasting(content_of(with_it)) != lasting(content_of(without)):
            yield f"{row.field}={value} is not the default: {with_it.text[:300]} against {without.text[:300]}"


def post(server: LiveServer, probe: Probe, row: Row, *value: Any) -> httpx.Response:
    """The answer to the probe's body with the row's field, or without it if there is no value."""
    body = json.loads(json.dumps(probe.body))
    *inside, name = row.field.split(".")
    place = body
    for key in [probe.inside] * bool(probe.inside) + inside:
        place = place.setdefault(key, {})
    place.update(probe.beside.get(row.field, {}))
    place.pop(name, None)
    if value:
        place[name] = value[0]
    return calls.post(getattr(server, probe.plane) + probe.path, json=body, timeout=60)


def is_refusal(answer: httpx.Response, row: Row) -> bool:
    """Whether the status is one of a refused request and the text names the field."""
    words = answer.text.lower().replace("_", " ")
    return 400 <= answer.status_code < 500 and row.field.split(".")[-1].lower().replace("_", " ") in words


def content_of(answer: httpx.Response) -> Any:
    """The JSON of an answer, or the text of a stream."""
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()
    frames = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for frame in frames for choice in json.loads(frame)["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def lasting(value: Any) -> Any:
    """The answer without what differs each time."""
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if not VOLATILE.fullmatch(key)}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def test_each_table_is_tried():
    tried = {(id(probe.page), probe.table) for probe in [*PROBES, *EMBEDDINGS]}
    tables = {(id(page), table) for page in (DIALECTS, MINDIE, DJL) for table in page.tables if table not in ELSEWHERE}
    assert tables == tried


def test_the_tables_have_the_fields_of_the_bodies(server):
    """Each route of the front plane whose body has a schema has tables with exactly its fields."""
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    untold: list[str] = []
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            continue
        given = content["application/json"]["schema"]
        for reference in given.get("anyOf", [given]):
            schema = schemas[reference["$ref"].rpartition("/")[2]]
            fields = set(fields_of(schema, schemas))
            plain = f"`POST {path.replace('/versions/{version}', '').replace('/{repository}', '')}`"
            routes = [route for route in DIALECTS.routes if route == plain or route.startswith(f"{plain} with ")]
            told = [
                {row.field for table in DIALECTS.routes[route] for row in DIALECTS.tables[table]} for route in routes
            ]
            if not any(fields == rows or (fields < rows and path.startswith("/v2/")) for rows in told):
                untold.append(f"{path}: {[sorted(fields ^ rows) for rows in told] or sorted(fields)}")
    assert not untold


def fields_of(schema: dict[str, Any], schemas: dict[str, Any]):
    """The names of an object's fields, those of `parameters` after its own name."""
    for name, described in schema["properties"].items():
        yield name
        reference = described.get("$ref") or next(
            (each["$ref"] for each in described.get("allOf", ()) if "$ref" in each), ""
        )
        if name == "parameters" and reference:
            nested = schemas[reference.rpartition("/")[2]]["properties"]
            yield from (f"{name}.{each}" for each in nested)


def test_each_inference_route_of_mindie_has_a_table():
    from inference.dialects.mindie.routes import service_routes

    paths = {
        route.plain_path.replace("/versions/{version}", "") for route in service_routes(None) if route.needs_permit
    }
    assert paths
    for path in paths:
        routes = [route for route in MINDIE.routes if route.startswith(f"`POST {path}`")]
        assert routes, path
        assert all(MINDIE.routes[route] for route in routes), path


def test_the_table_of_tritons_parameters_has_the_names_that_the_code_reads():
    from inference.dialects.triton import guides, parameters

    read_by_code = {
        *parameters.FLAGS, *parameters.ALIASES, *parameters.OtherFields.__struct_fields__, *parameters.LOGITS,
        *parameters.NOT_SERVED, *parameters.SEQUENCES, *guides.VLLM, guides.TYPE, guides.GUIDE,
        "runtime_top_p", "timeout", "sampling_parameters", "priority",
    }  # fmt: skip
    rows = {row.field for row in DIALECTS.tables["parameters-of-an-inference"]}
    assert rows | {"stream"} == read_by_code
