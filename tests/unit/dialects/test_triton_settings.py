"""Triton's extensions that can be asked about and not used: traces, the log's settings, shared memory; and the server's name."""

from __future__ import annotations

import pytest

from inference.dialects.triton.settings import TritonSettings
from inference.dialects.triton.statistics import TritonStatistics

TRACE, LOG = "/v2/trace/setting", "/v2/logging"


@pytest.mark.parametrize(("path", "body", "status", "words"), [
    (TRACE, {}, 200, None),
    (TRACE, {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": None}, 200, None),
    (TRACE, {"trace_level": ["TIMESTAMPS"]}, 503, "the server does not support tracing"),
    (TRACE, {"trace_level": ["OFF", "TENSORS"]}, 400, "Expect only one trace level 'OFF' is specified"),
    (TRACE, {"trace_level": "OFF"}, 400, "trace_level must be a list of strings"),
    (TRACE, {"trace_file": "/x"}, 501, "trace file location can not be updated through network protocol"),
    (TRACE, {"trace_rate": 5}, 400, "trace_rate must be a number, as a string"),
    (TRACE, {"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
    (TRACE, {"trace_rate": "0"}, 503, "the server does not support tracing"),
    (TRACE, {"trace_rate": "-1"}, 400,
     "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: -1"),
    (TRACE, {"trace_rate": "2147483647"}, 503, "the server does not support tracing"),
    (TRACE, {"trace_rate": "2147483648"}, 400,
     "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 2147483648"),
    (TRACE, {"trace_count": "-1"}, 200, None),
    (TRACE, {"trace_count": "-2"}, 400, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
    (TRACE, {"log_frequency": "1"}, 503, "the server does not support tracing"),
    (TRACE, [], 400, "The body must be a JSON object."),
    ("/v2/models/none/trace/setting", {}, 400, "Request for unknown model : none"),
    ("/v2/models/demo/trace/setting", {"trace_rate": None}, 200, None),
    (LOG, {"log_info": True, "log_verbose_level": 0, "log_file": None}, 200, None),
    (LOG, {"log_info": False}, 503, "the server does not support dynamic logging"),
    (LOG, {"log_info": "x"}, 400, "expect boolean for 'log_info'"),
    (LOG, {"log_verbose_level": -1}, 400, "expect unsigned integer for 'log_verbose_level'"),
    (LOG, {"log_verbose_level": 1 << 32}, 400, "expect unsigned integer for 'log_verbose_level'"),
    (LOG, {"log_verbose_level": 1}, 503, "the server does not support dynamic logging"),
    (LOG, {"log_format": "x"}, 503, "invalid argument for --log_format, got: x"),
    (LOG, {"log_format": "ISO8601"}, 503, "the server does not support dynamic logging"),
    (LOG, {"log_format": 5}, 400, "expect string for 'log_format'"),
    (LOG, {"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
    ("/v2/systemsharedmemory/region/a/register", {"key": "a"}, 501, "Client shared memory is disabled."),
    ("/v2/systemsharedmemory/unregister", {}, 501, "Client shared memory is disabled."),
    ("/v2/cudasharedmemory/region/a/unregister", {}, 501, "Client shared memory is disabled."),
    ("/v2/cudasharedmemory/status", {}, 405, "Method Not Allowed"),
])  # fmt: skip
async def test_updates(serving, path, body, status, words):
    answer = await serving.post(path, body)
    if words is None:
        assert (answer.status, answer.json()) == (200, (await serving.get(path)).json())
    else:
        assert (answer.status, answer.json()) == (status, {"error": words})


async def test_tensors_in_shared_memory_are_not_found(serving):
    region = {"shared_memory_region": "a", "shared_memory_byte_size": 8}
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    for body in (
        {"inputs": [{**text, "parameters": region}]},
        {"inputs": [text], "outputs": [{"name": "text_output", "parameters": region}]},
    ):
        answer = await serving.post("/v2/models/demo/infer", body)
        assert (answer.status, answer.json()) == (404, {"error": "Unable to find shared memory region: 'a'"})


async def test_the_server_has_the_name_that_it_was_given(serving):
    assert (await serving.get("/v2")).json()["name"] == "dragoman"
    serving.services.generator.observers[:] = [TritonStatistics(TritonSettings(triton_server_name="triton"))]
    assert (await serving.get("/v2")).json()["name"] == "triton"
