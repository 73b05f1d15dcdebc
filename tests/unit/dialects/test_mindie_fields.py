"""What MindIE's routes accept and refuse at both sides of each bound, in the vendor's words."""

from __future__ import annotations

from typing import Any

import pytest

from inference.dialects.mindie.settings import MindieSettings
from tests.unit.scripts import says

TGI: dict[str, Any] = {"inputs": "The capital"}
VLLM: dict[str, Any] = {"prompt": "The capital"}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "The capital"}
TRITON: dict[str, Any] = {"text_input": "The capital"}
TENSOR: dict[str, Any] = {
    "inputs": [{"name": "a", "shape": [1, 2], "datatype": "UINT32", "data": [293, 341]}], "outputs": [{"name": "b"}]
}  # fmt: skip
MODEL = "/v2/models/demo"
INT, LONG = 2**31 - 1, 2**63 - 1
TOP_K = "Parameter top_k must be in -1 || (0,2147483647], got {}"
TOP_P = "Parameter top_p must be in (0.0,1.0], got {}."
TEMPERATURE = "Parameter temperature must be in (0.0,3.40282e+38], got {}."
STOP_LIST = (
    "Input validation error: `stop` must be list[string] if list, and item length in [1, 1024] with total <= 32768"
)
STOP_ONE = "Input validation error: length of `stop` must be in [1, {}], but got {}"
SPAN = "in (0,2147483647], got {}."
TIMEOUT = "Parameter timeout must be strictly positive and small than 65535 seconds, got {}."
BEST_OF = "Parameter [best_of] should be in [1, 128], got {}."
N = "Parameter [n] should be in [1, 8192], got {}. "
FREQUENCY = "Parameter frequency_penalty should be in [-2.0, 2.0], got {}."
PRESENCE = "Parameter presence_penalty not in [-2.0, 2.0], but got {}."
BATCH = (
    "The n parameter (65) exceeds 'max_batch_size' (64). Please reduce n or increase 'max_batch_size' in config.json of "
    "mindie-service. "
)
BEAMS = "Please set the max_tokens to be not larger than 128 when the use_beam_search is on."
SAMPLED = {"temperature": 1.0}

NESTED_BOUNDS = [
    ({"temperature": 1e-9}, {"temperature": 0}, TEMPERATURE.format(0)),
    ({"temperature": 3e38}, {"temperature": 3.5e38}, TEMPERATURE.format("3.5e+38")),
    ({"typical_p": 1}, {"typical_p": 1.1}, "Parameter typical_p must be in (0.0,1.0], got 1.1."),
    ({"seed": LONG}, {"seed": LONG + 1}, f"Parameter seed must be in [0, {LONG}], got {LONG + 1}."),
    ({"seed": 0}, {"seed": -1}, "seed must be unsigned type."),
    ({"repetition_penalty": 3e38}, {"repetition_penalty": 0},
     "Parameter 'repetition_penalty' must be in (0.0, 3.40282e+38], got 0."),
    ({"max_new_tokens": 1}, {"max_new_tokens": 0}, f"Parameter max_new_tokens must be {SPAN.format(0)}"),
    ({"max_new_tokens": INT}, {"max_new_tokens": INT + 1}, f"Parameter max_new_tokens must be {SPAN.format(INT + 1)}"),
]  # fmt: skip
TIMED = [
    ({"timeout": 1}, {"timeout": 0}, TIMEOUT.format(0)),
    ({"timeout": 65535}, {"timeout": 65536}, TIMEOUT.format(65536)),
    ({"priority": 5}, {"priority": 6}, "Parameter priority must be in [1,5], got 6."),
    ({"priority": 1}, {"priority": 0}, "Parameter priority must be in [1,5], got 0."),
]
STRICT = [
    ({"top_k": 1}, {"top_k": 0}, TOP_K.format(0)),
    ({"top_k": INT}, {"top_k": INT + 1}, TOP_K.format(INT + 1)),
    ({"top_k": 1}, {"top_k": -1}, TOP_K.format(-1)),
    ({"top_p": 0.99}, {"top_p": 1.0}, TOP_P.format(1.0)),
]
LENIENT = [
    ({"top_k": 0}, {"top_k": -1}, TOP_K.format(-1)),
    ({"top_p": 1}, {"top_p": 0}, TOP_P.format(0)),
    ({"batch_size": INT}, {"batch_size": 0}, f"Parameter batch_size must be {SPAN.format(0)}"),
]
ONLY_TGI = [
    ({"truncate": 1}, {"truncate": 0}, f"truncate must be {SPAN.format(0)}"),
    ({"truncate": INT}, {"truncate": INT + 1}, f"truncate must be {SPAN.format(INT + 1)}"),
    ({"stop": "a" * 1024}, {"stop": "a" * 1025}, STOP_ONE.format(1024, 1025)),
    ({"stop": ["x"] * 1024}, {"stop": ["x"] * 1025}, STOP_LIST),
]
FLAT = [
    ({"temperature": 0}, {"temperature": -0.1}, TEMPERATURE.format(-0.1)),
    ({"top_k": -1}, {"top_k": 0}, TOP_K.format(0)),
    ({"top_k": INT}, {"top_k": -2}, TOP_K.format(-2)),
    ({"frequency_penalty": 2}, {"frequency_penalty": 2.1}, FREQUENCY.format(2.1)),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.1}, FREQUENCY.format(-2.1)),
    ({"presence_penalty": 2}, {"presence_penalty": 2.1}, PRESENCE.format(2.1)),
    ({"presence_penalty": -2}, {"presence_penalty": -2.1}, PRESENCE.format(-2.1)),
    ({"best_of": 1}, {"best_of": 0}, BEST_OF.format(0)),
    ({"best_of": 1}, {"best_of": 129}, BEST_OF.format(129)),
    ({"n": 1}, {"n": 0}, N.format(0)),
    ({"n": 1}, {"n": 8193}, N.format(8193)),
    ({"n": 1}, {"n": 65}, BATCH),
    ({"max_tokens": 1}, {"max_tokens": 0}, "Parameter max_tokens must be (0,2147483647], got 0"),
    ({"max_tokens": INT}, {"max_tokens": INT + 1}, f"Parameter max_tokens must be (0,{INT}], got {INT + 1}"),
    ({"max_tokens": 1}, {"max_tokens": "1"}, "Parameter max_tokens not number_integer"),
    ({"stop": "a" * 32768}, {"stop": "a" * 32769}, STOP_ONE.format(32768, 32769)),
    ({"stop": "\U0001f600" * 16384}, {"stop": "\U0001f600" * 16385}, STOP_ONE.format(32768, 32770)),
    ({"stop": "a"}, {"stop": ""}, STOP_ONE.format(32768, 0)),
    ({"stop": []}, {"stop": [""]}, STOP_LIST),
    ({"stop": ["a" * 1024]}, {"stop": ["a" * 1025]}, STOP_LIST),
    ({"stop": ["a" * 1024] * 32}, {"stop": ["a" * 1024] * 32 + ["b"]}, STOP_LIST),
    ({"stop": ["a"]}, {"stop": [5]}, STOP_LIST),
    ({"stop": None}, {"stop": 5}, "Input validation error: param stop must be string or list[string]"),
    ({"include_stop_str_in_output": 5}, {"stop": None, "include_stop_str_in_output": 5},
     "include_stop_str_in_output must be boolean type."),
]  # fmt: skip
ONLY_VLLM = [
    ({"model": "a" * 256}, {"model": "a" * 257},
     "Input validation error: length of `model` must be in [1, 256], but got 257"),
    ({"model": None}, {"model": ""}, "Input validation error: length of `model` must be in [1, 256], but got 0"),
    ({"model": "x"}, {"model": 5}, "Model must be string type."),
    ({**SAMPLED, "n": 2}, {"n": 2},
     "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is None, n is 2."),
    ({**SAMPLED, "n": 2, "best_of": 3}, {**SAMPLED, "n": 3, "best_of": 2},
     "best_of should greater than or equal to n, but best_of is 2, n is 3."),
    ({**SAMPLED, "n": 1, "best_of": 2, "stream": True}, {"best_of": 2},
     "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is 2, n is None."),
]  # fmt: skip
OPENAI = [
    ({"repetition_penalty": 2}, {"repetition_penalty": 2.1},
     "Parameter 'repetition_penalty' must be in (0.0, 2], got 2.1."),
    ({"use_beam_search": True, "max_tokens": 1}, {"use_beam_search": True, "max_tokens": 129}, BEAMS),
    ({"max_tokens": 1}, {"use_beam_search": True}, BEAMS),
    ({"response_format": None}, {"response_format": 5}, "Parameter response_format must be an object"),
    ({"response_format": {"type": "text"}}, {"response_format": {}},
     "Parameter response_format must contain 'type' field"),
    ({}, {"response_format": {"type": 5}}, "Parameter response_format.type must be a string"),
    ({}, {"response_format": {"type": "xml"}},
     "Parameter response_format.type must be 'json_object', 'json_schema' or 'text', got 'xml'"),
    ({}, {"response_format": {"type": "json_schema"}},
     "Parameter response_format.json_schema is required when type is 'json_schema'"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": 5}},
     "Parameter response_format.json_schema must be an object"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {}}},
     "Parameter response_format.json_schema.name is required"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": 5}}},
     "Parameter response_format.json_schema.name must be a string"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 65}}},
     "Parameter response_format.json_schema.name must be 1-64 characters"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "Parameter response_format.json_schema.schema is required when type is 'json_schema'"),
    ({}, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
     "Parameter response_format.json_schema.schema must be an object"),
]  # fmt: skip
ONLY_CHAT = [
    ({"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 21},
     "Parameter top logprobs must be in [0, 20], got 21."),
    ({"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0},
     "Value error, when using top_logprobs, logprobs must be true or null in chat completions"),
    ({"chat_template_kwargs": {"thinking_budget": 1}}, {"chat_template_kwargs": {"thinking_budget": 0}},
     "Parameter thinking_budget must be in [1,2147483647], got 0"),
    ({**SAMPLED, "n": 2}, {"n": 2},
     "best_of/n can not greater than 1 without using beam search when temperature is 0 or not set, but best_of is None, "
     "n is 2."),
    ({**SAMPLED, "n": 2, "best_of": 2}, {**SAMPLED, "n": 3, "best_of": 2},
     "best_of must be greater than or equal to n, but best_of is 2, n is 3."),
    ({**SAMPLED, "n": 2, "best_of": 2, "stream": True}, {**SAMPLED, "n": 1, "best_of": 2, "stream": True},
     "best_of must be equal to n in stream mode, but best_of is 2, n is 1."),
    ({}, {**SAMPLED, "best_of": 2, "stream": True},
     "best_of must be equal to n in stream mode, but best_of is 2, n is None."),
]  # fmt: skip
ONLY_TEXT = [
    ({"logprobs": 5}, {"logprobs": 6}, "logprobs should be in range [0, 5], got 6."),
    ({}, {"n": 2},
     "Best_of and n shouldn't be greater than 1 when sampling is disabled, but best_of is null and n is 2."),
    ({}, {**SAMPLED, "n": 3, "best_of": 2},
     "Best_of must be greater than or equal to n, but best_of is 2 and n is 3."),
    ({}, {**SAMPLED, "n": 1, "best_of": 2, "stream": True}, "best_of must be equal to n, but best_of is 2 and n is 1."),
    ({}, {**SAMPLED, "best_of": 2, "stream": True},
     "best_of must be equal to n in stream mode, but best_of is 2, n is None."),
    ({"prompt": [5]}, {"prompt": []}, "Prompt array cannot be empty."),
    ({}, {"prompt": ""},
     "Length of Prompt text should be greater than 0 and less than or equal to 41943040, but got 0"),
]  # fmt: skip
PATHS = [
    ("/generate", TGI, True, NESTED_BOUNDS + STRICT + ONLY_TGI),
    ("/infer", TGI, True, NESTED_BOUNDS + STRICT + TIMED),
    (f"{MODEL}/generate", TRITON, True, NESTED_BOUNDS + LENIENT + TIMED),
    (f"{MODEL}/infer", TENSOR, True, [b for b in NESTED_BOUNDS if "typical_p" not in b[0]] + LENIENT + TIMED),
    ("/generate", VLLM, False, FLAT + ONLY_VLLM),
    ("/v1/chat/completions", CHAT, False, FLAT + OPENAI + ONLY_CHAT),
    ("/v1/completions", TEXT, False, FLAT + OPENAI + ONLY_TEXT),
]
INPUTS = [
    ("/generate", {"inputs": 5}, "The type of inputs is abnormal"),
    ("/generate", {"inputs": ""}, "Inputs length must be in (0, 41943040], but got 0"),
    ("/generate_stream", {}, "Request should contain 'inputs' and the type should be string."),
    ("/generate", {"prompt": 5}, "The type of prompt is abnormal"),
    ("/generate", {"prompt": ""},
     "Prompt must be necessary and data type must be string and length in (0, 41943040], but the length of inputs is 0"),
    ("/infer", {}, "Not found inputs."),
    ("/infer", {"inputs": None}, "Inputs must not be null"),
    ("/infer", {"inputs": ""},
     "Inputs must be necessary and data type must be string and length in (0, 41943040], but the length of inputs is 0"),
    ("/infer", {"inputs": [{"type": "text", "text": 5}]}, "Request param text must be string"),
    ("/infer", {"inputs": None, "input_id": [1]}, "Input conflict."),
    ("/infer_token", {"input_id": None}, "Input_id should not be empty"),
    ("/infer_token", {"input_id": []}, "Inputs token length must be in (0, 1048576], but got 0"),
    ("/infer_token", {"input_id": [-1]}, "Data element in param input_id is invalid"),
    (f"{MODEL}/generate", {}, "The text_input not found"),
    (f"{MODEL}/generate", {"text_input": 5}, "The type of text_input is abnormal. The requestId is endpoint_common_1"),
    (f"{MODEL}/generate", {"text_input": ""},
     "text_input must be necessary and data type must be string and length in (0, 41943040], but the length of inputs is 0"),
    (f"{MODEL}/generate", {**TRITON, "id": 5}, "id must be string type."),
    (f"{MODEL}/generate", {**TRITON, "id": "a b"},
     "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length."),
]  # fmt: skip
MESSAGES = [
    ({"role": "user", "content": 5}, "The type of inputs is abnormal"),
    ({"role": 5, "content": "a"}, "Request param contains not role or role null"),
    ({"role": "tool", "content": "a"},
     "Request param contains not tool_call_id or tool_call_id null while role is tool"),
    ({"role": "tool", "content": "a", "tool_call_id": 5}, "The type of tool_call_id is abnormal"),
    ({"role": "tool", "content": "a", "tool_call_id": ""},
     "Request param tool_call_id len should not be 0 while role is tool"),
]  # fmt: skip
TENSORS = [
    ({"name": None}, "Cannot find name in inputs or its type is not string"),
    ({"name": "a" * 257}, "The length of name set in inputs exceeds 256."),
    ({"shape": 5}, "Cannot find shape in inputs or its type is not array"),
    ({"shape": [1.5]}, "Shape element must be integer type."),
    ({"shape": [-1]}, "Shape element must be integer type."),
    ({"datatype": 5}, "Cannot find datatype in inputs or its type is not string"),
    ({"datatype": "FP32"}, "Unsupported datatype, got FP32."),
    ({"data": 5}, "Cannot find data in inputs or its type is not array"),
    ({"data": [1, "a"]}, "Data element must be integer type."),
    ({"data": [1] * ((1 << 20) + 1)}, "Data element must be no more than max token id length, which is 1048576."),
]


def with_fields(body: dict[str, Any], fields: dict[str, Any], nested: bool) -> dict[str, Any]:
    return {**body, "parameters": fields} if nested else {**body, **fields}


BOUNDS = [(path, body, nested, *each) for path, body, nested, bounds in PATHS for each in bounds]


@pytest.mark.parametrize(("path", "body", "nested", "inside", "outside", "text"), BOUNDS)
async def test_both_sides_of_a_bound(serving, path, body, nested, inside, outside, text):
    serving.worker.default = says(" Rome.")
    refused = await serving.post(path, with_fields(body, outside, nested), plane="mindie")
    assert (refused.status, refused.json()) == (422, {"error": text, "error_type": "Input Validation Error"})
    taken = await serving.post(path, with_fields(body, inside, nested), plane="mindie")
    assert taken.status == 200, taken.text


@pytest.mark.parametrize(("path", "body", "text"), INPUTS)
async def test_inputs(serving, path, body, text):
    answer = await serving.post(path, body, plane="mindie")
    assert (answer.status, answer.json()["error"]) == (422, text)


@pytest.mark.parametrize(("changes", "text"), TENSORS)
async def test_tensors(serving, changes, text):
    tensor = {**TENSOR["inputs"][0], **changes}
    answer = await serving.post(f"{MODEL}/infer", {**TENSOR, "inputs": [tensor]}, plane="mindie")
    assert (answer.status, answer.json()["error"]) == (422, text)


@pytest.mark.parametrize(("message", "text"), MESSAGES)
async def test_messages(serving, message, text):
    answer = await serving.post("/v1/chat/completions", {**CHAT, "messages": [message]}, plane="mindie")
    assert (answer.status, answer.json()["error"]) == (422, text)


async def test_a_chat_of_openais_own_flavour(start):
    serving = await start(mindie=MindieSettings(open_ai_support="openai"))
    serving.worker.default = says(" Rome.")
    for inside, outside, text in (
        ({"temperature": 2}, {"temperature": 2.1}, "Parameter temperature must be in (0.0,2], got 2.1."),
        ({"top_k": 0}, {"top_k": -1}, TOP_K.format(-1)),
        ({"stop": "a" * 1024}, {"stop": "a" * 1025}, STOP_ONE.format(1024, 1025)),
    ):
        refused = await serving.post("/v1/chat/completions", {**CHAT, **outside}, plane="mindie")
        assert (refused.status, refused.json()["error"]) == (422, text)
        assert (await serving.post("/v1/chat/completions", {**CHAT, **inside}, plane="mindie")).status == 200


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (MindieSettings(max_prefill_batch_size=2), "The n parameter (3) exceeds 'maxPrefillBatchSize' (2). Please reduce n "
         "or increase 'maxPrefillBatchSize' in config.json of mindie-service."),
        (MindieSettings(max_n=2), "The n parameter (3) exceeds 'maxN' (2). Please reduce n or increase 'maxN' in "
         "config.json of mindie-service."),
        (MindieSettings(async_scheduling=True), "n must be 1 while MINDIE_ASYNC_SCHEDULING_ENABLE is on"),
    ],
)  # fmt: skip
async def test_limits_of_n(start, settings, text):
    serving = await start(mindie=settings)
    for path, body in (("/generate", VLLM), ("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        answer = await serving.post(path, {**body, **SAMPLED, "n": 3}, plane="mindie")
        assert (answer.status, answer.json()["error"]) == (422, text)


async def test_beams_and_asynchronous_scheduling(start):
    serving = await start(mindie=MindieSettings(async_scheduling=True))
    answer = await serving.post("/v1/completions", {**TEXT, "use_beam_search": True, "max_tokens": 2}, plane="mindie")
    text = "use_beam_search is not supported while MINDIE_ASYNC_SCHEDULING_ENABLE is on"
    assert (answer.status, answer.json()["error"]) == (422, text)


async def test_beams_take_the_servers_own_length(start):
    """Without `max_tokens` it is `maxIterTimes` that must be at most 128."""
    serving = await start(mindie=MindieSettings(max_iter_times=128))
    answer = await serving.post("/v1/completions", {**TEXT, "use_beam_search": True}, plane="mindie")
    assert answer.status == 200, answer.text


async def test_a_seed_that_the_server_chose_can_be_sent_back(serving):
    """MindIE draws 32 bits and accepts 63."""
    for _ in range(20):
        serving.worker.scripts += [says(" Rome."), says(" Rome.")]
        body: dict[str, Any] = {"inputs": "The capital", "parameters": {"details": True}}
        seed = (await serving.post("/infer", body, plane="mindie")).json()["details"]["seed"]
        assert 0 <= seed < 1 << 32
        body["parameters"]["seed"] = seed
        again = await serving.post("/infer", body, plane="mindie")
        assert (again.status, again.json()["details"]["seed"]) == (200, seed)
