"""The bodies and outputs of Triton's vLLM and TensorRT-LLM backends, and of KServe's text generation, over HTTP."""

from __future__ import annotations

import json

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from inference.dialects.triton.metrics import own
from inference.dialects.triton.settings import TritonSettings
from inference.dialects.triton.statistics import TritonStatistics
from management.snapshot import AdapterEntry
from tests.unit.scripts import EMBEDDING, Script, ids, says

INFER, GENERATE, STREAM = (f"/v2/models/demo/{name}" for name in ("infer", "generate", "generate_stream"))
PROMPT = "The capital"
ROME = says(" Rome.")
GREEDY = {"max_tokens": 20, "temperature": 0}


def tensor(name: str, datatype: str, *values: object, shape: list[int] | None = None) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(values)], "data": list(values)}


TEXT = tensor("text_input", "BYTES", PROMPT)


async def infer(serving, *inputs: dict[str, object], **fields: object) -> dict[str, dict[str, object]]:
    answer = await serving.post(INFER, {"inputs": list(inputs), "parameters": GREEDY, **fields})
    assert answer.status == 200, answer.json()
    return {output["name"]: output for output in answer.json()["outputs"]}


async def frames(serving, body: dict[str, object]) -> list[dict[str, object]]:
    answer = await serving.post(STREAM, {"text_input": PROMPT, "parameters": GREEDY, **body})
    assert answer.status == 200
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in answer.chunks if chunk.startswith(b"data: ")]


@pytest.mark.parametrize(("asked", "most"), [(None, None), (0, 1), ("2", 3)])
async def test_logprobs_are_as_many_as_sampling_parameters_say(serving, asked, most):
    serving.worker.scripts.append(ROME)
    given = {"temperature": "0", **({} if asked is None else {"logprobs": asked})}
    sampling = tensor("sampling_parameters", "BYTES", json.dumps(given))
    outputs = await infer(serving, TEXT, sampling, tensor("return_logprobs", "BOOL", True))
    found = json.loads(outputs["logprobs"]["data"][0])
    if most is None:
        assert found is None
        return
    assert len(found) == 3
    assert all(1 <= len(token) <= most for token in found)
    assert found[0]["1540"] == {"logprob": -0.125, "rank": 1, "decoded_token": " Rome"}


async def test_a_stream_has_every_sequence_in_its_place(serving):
    first, second = Script(tokens=[*ids(" Rome."), 2], per_step=1), Script(tokens=[*ids(" Oslo"), 2], per_step=1)
    serving.worker.scripts.extend([first, second])
    flags = {"return_finish_reason": True, "return_cumulative_logprob": True, "return_num_output_tokens": True}
    got = await frames(serving, {"parameters": {"n": 2, "temperature": 1.0, "seed": 1, **flags}})
    assert all(len(frame["text_output"]) == len(frame["finish_reason"]) == 2 for frame in got)
    assert ["".join(frame["text_output"][index] for frame in got) for index in (0, 1)] == [" Rome.", " Oslo"]
    assert got[-1]["finish_reason"] == ["stop", "stop"]
    sums = [frame["cumulative_logprob"][0] for frame in got if frame["num_output_tokens"][0]]
    assert sums == [-0.125, -0.375, -0.75]


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
async def test_structured_outputs_as_text(serving, name):
    sampling = {"temperature": 0, name: json.dumps({"choice": ["Positive", "Negative"]})}
    await infer(serving, TEXT, tensor("sampling_parameters", "BYTES", json.dumps(sampling)))
    (submit,) = serving.worker.submits
    assert (submit.params.grammar.kind, submit.params.grammar.text) == ("choice", '["Positive","Negative"]')


@pytest.mark.parametrize(("name", "value", "kind"), [
    ("guided_json", '{"type": "object"}', "json_schema"),
    ("guided_regex", "a+", "regex"),
    ("guided_choice", '["Positive", "Negative"]', "choice"),
    ("guided_grammar", 'root ::= "a"', "grammar"),
])  # fmt: skip
async def test_guides_of_older_releases(serving, name, value, kind):
    """As parameters, which are texts, and beside the prompt."""
    await frames(serving, {"parameters": {**GREEDY, name: value}})
    assert serving.worker.submits[0].params.grammar.kind == kind


async def test_a_choice_of_one(serving):
    await frames(serving, {"guided_choice": ["Positive"]})
    assert serving.worker.submits[0].params.grammar.text == '["Positive"]'


@pytest.mark.parametrize(("kind", "guide", "expected"), [
    ("json", None, "json_schema"),
    ("json_schema", '{"type": "object"}', "json_schema"),
    ("regex", "a+", "regex"),
    ("ebnf_grammar", 'root ::= "a"', "grammar"),
])  # fmt: skip
async def test_tensorrt_llms_guides(serving, kind, guide, expected):
    inputs = [TEXT, tensor("guided_decoding_guide_type", "BYTES", kind, shape=[1, 1])]
    inputs += [] if guide is None else [tensor("guided_decoding_guide", "BYTES", guide, shape=[1, 1])]
    await infer(serving, *inputs)
    assert serving.worker.submits[0].params.grammar.kind == expected


async def test_token_ids_as_tensorrt_llm_sends_them(serving):
    serving.worker.scripts.append(ROME)
    one = {"shape": [1, 1]}
    outputs = await infer(
        serving, tensor("input_ids", "INT32", 293, 341, shape=[1, 2]), tensor("input_lengths", "INT32", 2, **one),
        tensor("request_output_len", "INT32", 9, **one), tensor("beam_width", "INT32", 1, **one),
        tensor("runtime_top_k", "INT32", 1, **one), tensor("runtime_top_p", "FP32", 0.0, **one),
        tensor("streaming", "BOOL", False, **one), tensor("end_id", "INT32", 2, **one), tensor("pad_id", "INT32", 2, **one),
        tensor("return_log_probs", "BOOL", True, **one), parameters={},
    )  # fmt: skip
    assert outputs["output_ids"] == tensor("output_ids", "INT32", 1540, 16, 2, shape=[1, 1, 3])
    assert outputs["sequence_length"] == tensor("sequence_length", "INT32", 3, shape=[1, 1])
    assert outputs["cum_log_probs"] == tensor("cum_log_probs", "FP32", -0.75, shape=[1, 1])
    assert outputs["output_log_probs"] == tensor("output_log_probs", "FP32", -0.125, -0.25, -0.375, shape=[1, 1, 3])
    (submit,) = serving.worker.submits
    assert (submit.params.max_tokens, submit.params.top_k, submit.params.top_p) == (9, 1, 1.0)


async def test_no_top_p_as_tensorrt_llms_clients_send_it(serving):
    one = {"shape": [1, 1]}
    named = (TEXT, tensor("top_p", "FP32", 0.0, **one), tensor("stop", "BOOL", False, **one))
    await infer(serving, *named, tensor("beam_width", "INT32", 1, **one), parameters={})
    assert serving.worker.submits[0].params.top_p == 1.0
    refused = await serving.post("/v2/models/demo/infer", {"inputs": list(named)})
    assert (refused.status, "top_p" in refused.json()["error"]) == (400, True)


async def test_prefixed_sampling_parameters(serving):
    serving.worker.scripts.append(ROME)
    await infer(serving, TEXT, tensor("sampling_param_max_tokens", "INT32", 11),
                tensor("sampling_param_top_k", "INT64", 3), parameters={})  # fmt: skip
    (submit,) = serving.worker.submits
    assert (submit.params.max_tokens, submit.params.top_k) == (11, 3)


async def test_a_beam_for_each_of_its_width(serving):
    outputs = await infer(
        serving, TEXT, tensor("beam_width", "INT32", 2), tensor("max_tokens", "INT32", 1), parameters={}
    )
    assert outputs["text_output"]["shape"] == [2]


async def test_tensorrt_llms_streams_have_no_prompt_whatever_they_say(serving):
    serving.worker.scripts.append(ROME)
    told = await frames(serving, {"exclude_input_in_output": False, "beam_width": 1})
    assert "".join(frame["text_output"] for frame in told) == " Rome."


async def test_only_the_named_outputs(serving):
    serving.worker.scripts.extend([ROME, ROME])
    flag = tensor("return_finish_reason", "BOOL", True)
    named = [{"name": "text_output"}, {"name": "logprobs"}]
    assert list(await infer(serving, TEXT, flag, outputs=named)) == ["text_output"]
    named = [{"name": "finish_reason"}]
    assert list(await infer(serving, TEXT, flag, outputs=named)) == ["finish_reason"]


@pytest.mark.parametrize(("repeats", "flag", "text"), [
    (False, None, " Rome."), (True, None, "The capital Rome."), (True, True, " Rome."), (False, False, "The capital Rome."),
])  # fmt: skip
async def test_the_prompt_in_an_answer_that_is_no_stream(serving, repeats, flag, text):
    settings = TritonSettings(triton_exclude_input_in_output=not repeats)
    serving.services.generator.observers[:] = [TritonStatistics(settings)]
    serving.worker.scripts.extend([ROME, ROME])
    flags = [] if flag is None else [tensor("exclude_input_in_output", "BOOL", flag)]
    assert (await infer(serving, TEXT, *flags))["text_output"]["data"] == [text]
    assert "".join(frame["text_output"] for frame in await frames(serving, {})) == " Rome."


@pytest.mark.parametrize(("script", "reason"), [(ROME, "eos_token"), (says(" Rome. Oslo"), "stop_sequence"),
                                                (Script(tokens=ids(" Rome"), finish=FinishReason.LENGTH), "length")])  # fmt: skip
async def test_kserves_reasons(serving, script, reason):
    serving.worker.scripts.append(script)
    answer = await serving.post(
        GENERATE, {"text_input": PROMPT, "parameters": {**GREEDY, "details": True, "stop": ["Os"]}}
    )
    assert answer.json()["details"]["finish_reason"] == reason


@pytest.mark.parametrize(("request_", "length"), [({"input": "a"}, 4), ({"input": [5, 6]}, 4)])
async def test_embeddings_as_vllms_backend_answers(start, request_, length):
    serving = await start(info=EMBEDDING)
    told = tensor("return_num_input_tokens", "BOOL", True)
    outputs = await infer(serving, tensor("embedding_request", "BYTES", json.dumps(request_)), told)
    assert len(json.loads(outputs["text_output"]["data"][0])) == length
    assert outputs["num_input_tokens"]["data"][0] >= 1


def asks(*inputs: dict[str, object], **parameters: object) -> dict[str, object]:
    return {"inputs": [TEXT, *inputs], "parameters": parameters}


@pytest.mark.parametrize(("body", "words"), [
    (asks(logprobs=21), "logprobs must be between 0 and 20"),
    (asks(beam_width=0), "beam_width must be between 1"),
    (asks(len_penalty=11), "len_penalty must be between -10 and 10"),
    (asks(timeout=-1), "timeout must be a number of microseconds from 0 to 18446744073709551615"),
    (asks(timeout=10**400), "timeout must be a number of microseconds from 0"),
    (asks(tensor("timeout", "FP64", 10**400)), "timeout must be a number of microseconds from 0"),
    (asks(sampling_parameters='{"logit_bias": {"5": "nan"}}'), "logit_bias: values must be numbers"),
    (asks(structured_outputs="x"), "structured_outputs: this is not valid JSON"),
    (asks(structured_outputs="5"), "structured_outputs must be a JSON object"),
    (asks(structured_outputs='{"regex": "a", "choice": ["b"]}'), "structured_outputs: exactly one of"),
    (asks(structured_outputs='{"regex": "a"}', guided_decoding='{"regex": "a"}'), "structured_outputs and guided_decoding"),
    (asks(guided_decoding_guide_type="xml"), "guided_decoding_guide_type must be one of json, json_schema"),
    (asks(guided_decoding_guide_type="regex"), "guided_decoding_guide must be given for regex"),
    (asks(guided_json="{"), "guided_json: this is not valid JSON"),
    (asks(guided_regex="a", guided_choice='["a"]'), "guided_regex and guided_choice"),
    (asks(guided_decoding_guide="a"), "guided_decoding_guide needs guided_decoding_guide_type"),
    (asks(return_context_logits=True), "return_context_logits is not supported"),
    (asks(return_generation_logits=True), "return_generation_logits is not supported"),
    (asks(lora_task_id=1), "lora_task_id is not supported"),
    (asks(tensor("embedding_bias_words", "BYTES", "a")), "embedding_bias_words is not supported"),
    (asks(triton_final_response=True), "reserved for Triton usage"),
    (asks(triton_enable_empty_final_response=True), "reserved for Triton usage"),
    ({"inputs": [tensor("other", "FP32", 1.0)], "parameters": {"triton_x": "a"}}, "reserved for Triton usage"),
    (asks(nested={"a": 1}), "parameter 'nested' has invalid type. It should be either 'int', 'bool', or 'string'."),
    (asks(TEXT), "input 'text_input' already exists in request"),
    ({"inputs": [TEXT], "outputs": [{"name": "text_output"}] * 2}, "output 'text_output' already exists in request"),
    (asks(tensor("embedding_request", "BYTES", "a", "b")), "unexpected inference input 'embedding_request'"),
])  # fmt: skip
async def test_refused(serving, body, words):
    answer = await serving.post(INFER, body)
    assert answer.status == 400
    assert words in answer.json()["error"]
    assert not serving.worker.submits


INPUT_TEXT, AS_VLLM = tensor("input_text", "BYTES", "a"), tensor("embedding_request", "BYTES", '{"input": "a"}')


@pytest.mark.parametrize(("body", "words"), [
    ({"inputs": [INPUT_TEXT], "outputs": [{"name": "foo"}]}, "unexpected inference output 'foo' for model 'demo'"),
    ({"inputs": [INPUT_TEXT], "outputs": [{"name": "text_output"}]}, "unexpected inference output 'text_output'"),
    ({"inputs": [AS_VLLM], "outputs": [{"name": "embeddings"}]}, "unexpected inference output 'embeddings'"),
    ({"inputs": [INPUT_TEXT], "outputs": [{"name": "embeddings"}] * 2}, "output 'embeddings' already exists in request"),
    ({"inputs": [INPUT_TEXT, tensor("a", "BOOL", True), tensor("a", "BOOL", True)]}, "input 'a' already exists in request"),
    ({"inputs": [INPUT_TEXT], "parameters": {"triton_x": 1}}, "reserved for Triton usage"),
    ({"inputs": [INPUT_TEXT], "parameters": {"nested": {"a": 1}}}, "parameter 'nested' has invalid type"),
    ({"inputs": [INPUT_TEXT], "parameters": {"lora_name": "x"}}, "LoRA x is not supported"),
    ({"inputs": [AS_VLLM, tensor("lora_name", "BYTES", "x")]}, "LoRA x is not supported"),
    ({"inputs": [INPUT_TEXT], "parameters": {"lora_name": 5}}, "lora_name must be a string"),
])  # fmt: skip
async def test_embeddings_have_the_same_checks(start, body, words):
    serving = await start(info=EMBEDDING)
    answer = await serving.post(INFER, body)
    assert answer.status == 400
    assert words in answer.json()["error"]


async def test_only_the_named_outputs_of_embeddings(start):
    serving = await start(info=EMBEDDING)
    told = tensor("return_num_input_tokens", "BOOL", True)
    named = [{"name": "num_input_tokens"}]
    assert list(await infer(serving, AS_VLLM, told, outputs=named)) == ["num_input_tokens"]
    assert list(await infer(serving, INPUT_TEXT, outputs=[{"name": "embeddings"}])) == ["embeddings"]


@pytest.mark.parametrize(("path", "body"), [
    (INFER, {"inputs": [INPUT_TEXT], "parameters": {"lora_name": "mine"}}),
    ("/v2/models/mine/infer", {"inputs": [INPUT_TEXT]}),
])  # fmt: skip
async def test_embeddings_take_no_adapters(start, path, body):
    serving = await start(info=EMBEDDING)
    serving.adapters = (AdapterEntry("mine", "digest", "/mine", 1),)
    serving.publish()
    answer = await serving.post(path, body)
    assert answer.status == 400
    assert "makes embeddings and takes no adapters" in answer.json()["error"]


async def test_embeddings_count(start):
    serving = await start(info=EMBEDDING)
    await infer(serving, tensor("input_text", "BYTES", "a", "b"))
    serving.worker.embed_failure = Failure(FailureCode.STEP_FAILED)
    assert (await serving.post(INFER, {"inputs": [INPUT_TEXT]})).status == 500
    refused = tensor("embedding_request", "BYTES", '{"input": "a", "pooling_params": {"dimensions": 99}}')
    assert (await serving.post(INFER, {"inputs": [refused]})).status == 400  # no worker got it
    (told,) = (await serving.get("/v2/models/demo/stats")).json()["model_stats"]
    kinds = told["inference_stats"]
    assert (told["inference_count"], kinds["success"]["count"], kinds["fail"]["count"]) == (1, 1, 1)
    assert 0 < kinds["compute_infer"]["ns"] <= kinds["success"]["ns"]
    text = own(serving.services).decode()
    assert 'nv_inference_request_success{model="demo",version="1"} 1' in text
    assert 'nv_inference_request_failure{model="demo",reason="OTHER",version="1"} 1' in text


@pytest.mark.parametrize(("text", "words"), [
    ("5", "embedding_request must be a JSON object"),
    ("{}", "input must be a string or token ids"),
    ('{"input": [true]}', "input must be a string or token ids"),
    ('{"input": "a", "pooling_params": 5}', "pooling_params.dimensions must be an integer"),
    ('{"input": "a", "pooling_params": {"dimensions": "x"}}', "pooling_params.dimensions must be an integer"),
])  # fmt: skip
async def test_refused_embeddings(start, text, words):
    serving = await start(info=EMBEDDING)
    answer = await serving.post(INFER, {"inputs": [tensor("embedding_request", "BYTES", text)]})
    assert answer.status == 400
    assert words in answer.json()["error"]


@pytest.mark.parametrize(("body", "text"), [
    ('{"text_input": 5}', "attempt to access JSON non-string as string"),
    ('{"text_input": "a", "stream": "false"}', "attempt to access JSON non-boolean as boolean"),
    ('{"text_input": "a", "stream": ["false"]}', "attempt to access JSON non-boolean as boolean"),
    ('{"text_input": "a", "stream": 0}', "attempt to access JSON non-boolean as boolean"),
    ('{"text_input": "a", "text_input": "b"}', "input 'text_input' already exists in request"),
    ('{"stream": false, "text_input": "a", "stream": false}', "input 'stream' already exists in request"),
])  # fmt: skip
async def test_inputs_have_their_type_and_come_once(serving, body, text):
    for path in ("generate", "generate_stream"):
        answer = await serving.post(f"/v2/models/demo/{path}", body.encode())
        assert (answer.status, text in answer.json()["error"]) == (400, True)
    assert not serving.worker.submits


async def test_an_inputs_name_elsewhere_is_no_second_one(serving):
    text, parameters = '"the \\"stream\\" and \\"stream\\""', '{"stream": false, "seed": 1, "seed": 2}'
    body = f'{{"text_input": {text}, "stream": false, "parameters": {parameters}}}'
    assert (await serving.post("/v2/models/demo/generate", body.encode())).status == 200
