"""POST /v2/models/{m}[/versions/{v}]/infer."""

from __future__ import annotations

import copy

import pytest

PATH = "/v2/models/demo/infer"
BODY = {
    "id": "req-1",
    "inputs": [{"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [364, 367, 259]}],
    "outputs": [{"name": "mine"}],
    "parameters": {"max_new_tokens": 3},
}


def changed(**changes):
    body = copy.deepcopy(BODY)
    body["inputs"][0].update(changes)
    return body


@pytest.mark.live
@pytest.mark.parametrize("path", [PATH, "/v2/models/demo/versions/1/infer"])
def test_golden(mindie, path):
    ids = mindie.server.post("/v1/completions", {"prompt": [364, 367, 259], "max_tokens": 3, "temperature": 0,
                                                 "return_token_ids": True}).json()["choices"][0]["token_ids"]  # fmt: skip
    data = ",".join(map(str, ids))
    expected = f'{{"id":"req-1","outputs":[{{"name":"mine","shape":[1,3],"datatype":"UINT32","data":[{data}]}}]}}'
    assert mindie.post(path, BODY).text == expected


@pytest.mark.live
def test_parameters_beside_the_tensor_go_before(mindie):
    body = changed(parameters={"max_new_tokens": 1})
    assert mindie.post(PATH, body).json()["outputs"][0]["shape"] == [1, 1]


@pytest.mark.live
def test_defaults(mindie):
    body = {**changed(shape=[3]), "outputs": [{"name": ""}]}
    del body["id"], body["parameters"]
    answer = mindie.post(PATH, body).json()
    assert answer["outputs"][0]["name"] == "output0"
    assert answer["id"].startswith("endpoint_common_")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({**BODY, "inputs": None}, "Req should contain 'inputs' and the type should be array."),
        ({**BODY, "inputs": []}, "Inputs count must be 1."),
        ({**BODY, "inputs": BODY["inputs"] * 2}, "Inputs count must be 1."),
        ({**BODY, "inputs": [], "id": "a b"}, "Inputs count must be 1."),
        (
            changed(shape=[2, 3]),
            "Shape must be at most two-dimensional, and the last element's value must be in (0,1048576].",
        ),
        (
            changed(shape=[]),
            "Shape must be at most two-dimensional, and the last element's value must be in (0,1048576].",
        ),
        (
            changed(shape=[0]),
            "Shape must be at most two-dimensional, and the last element's value must be in (0,1048576].",
        ),
        (changed(datatype="INT64"), "Unsupported datatype, got INT64."),
        (changed(data=[1, 2]), "Data size should be 3, got 2."),
        (changed(data="x"), "Cannot find data in inputs or its type is not array"),
        (changed(data=[1, 2, 3.5]), "Data element must be integer type."),
        ({**BODY, "outputs": None}, "Req should contain 'outputs' and the type should be array."),
        ({**BODY, "outputs": []}, "Outputs size should be 1, got 0."),
        ({**BODY, "outputs": [{}]}, "Outputs name must be non-empty string."),
        (
            {**BODY, "id": "a b"},
            "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length.",
        ),
        ({**BODY, "parameters": {"top_k": -1}}, "Parameter top_k must be in -1 || (0,2147483647], got -1"),
        ({**BODY, "parameters": {"batch_size": 0}}, "Parameter batch_size must be in (0,2147483647], got 0."),
        (b"{", "Failed to parse request context to json"),
    ],
)
def test_refused(mindie, body, error):
    mindie.refused(PATH, body, error)


def test_unknown_model_is_told_before_anything_else(mindie):
    mindie.refused("/v2/models/x/infer", b"{", "Model x not found.", 404)


def test_ids_that_the_model_has_not(mindie):
    mindie.refused(PATH, changed(data=[5, 6, 10**6]), "Failed to enqueue inferRequest. Invalid Input Ids", 424)
