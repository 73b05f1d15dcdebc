"""The normaliser: the documentation's three shapes, aliases, defaults, and every refusal. No database."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from management.api.scalegenai.answers import COLUMNS
from management.api.scalegenai.body import TRAILING_BRACES, decode_object
from management.api.scalegenai.canonical import canonical
from management.api.scalegenai.errors import ApiError, InvalidFields
from management.api.scalegenai.normaliser import normalise
from management.api.scalegenai.schema import AutoscalingConfig, DeploymentIn, WorkerConfig
from tests.unit.management.scalegenai.bodies_of_any_kind import ANY_BODY, JSON

BODIES = Path(__file__).parent / "bodies"
MINIMAL = {"name": "n", "model": "org/m"}


def wrong(body):
    """The refused fields by their dotted names, with the texts."""
    with pytest.raises(InvalidFields) as caught:
        normalise(body)
    return {error.name: error.text for error in caught.value.errors}


def scaling(**fields):
    return {**MINIMAL, "autoscaling_config": fields}


def workers(**fields):
    return {**MINIMAL, "initial_worker_config": fields}


def test_the_request_block_of_the_documentation():
    body, warning = decode_object((BODIES / "request_block.json").read_bytes())
    wanted = normalise(body)
    assert warning == ""
    expected = {
        "title": "string", "min_workers": 0, "max_workers": 100, "strategy": "ttft_latency_sec", "upper_threshold": 4.0,
        "lower_threshold": 1.0, "up_window_s": 300, "down_window_s": 300, "idle_timeout_s": 1800, "scale_to_zero": True,
        "max_price_per_hour": None, "min_throughput_rate": None, "gpu_type": "A100", "gpus_per_worker": 0,
        "use_other_gpus": True, "instance_types": [], "on_prem_node_ids": [], "cloud_providers": [],
    }  # fmt: skip
    assert {name: wanted.columns[name] for name in expected} == expected
    cloud = wanted.vendor_fields["controller_cloud_config"]
    assert (cloud["cloud_provider"], cloud["region"], cloud["use_ssl"]) == ("DATACRUNCH", "string", True)
    assert wanted.hub_token is None
    assert wanted.vendor_fields["extra"] == {}


@pytest.mark.parametrize("name", ["printed_curl.txt", "parameter_list.json"])
def test_the_two_newer_shapes_of_the_documentation(name):
    body, warning = decode_object((BODIES / name).read_bytes())
    assert warning == (TRAILING_BRACES if name == "printed_curl.txt" else "")
    wanted = normalise(body)
    expected = {
        "title": "llama-70b-dep", "upper_threshold": 5.0, "lower_threshold": 0.2, "scale_to_zero": True,
        "idle_timeout_s": 7200, "max_workers": 4, "gpu_type": "A100_80GB", "gpus_per_worker": 4,
        "cloud_providers": [{"name": "SCALEGENAI", "regions": ["US", "EU", "CANADA", "ASIA"]}],
    }  # fmt: skip
    assert {key: wanted.columns[key] for key in expected} == expected
    assert wanted.engine_options == {"max_model_len": 32000}
    assert (wanted.vendor_fields["upper_allowed_latency_sec"], wanted.vendor_fields["extra"]) == (1.0, {})


def test_defaults_are_the_vendors():
    wanted = normalise(MINIMAL)
    body = canonical(wanted.columns, wanted.vendor_fields)
    assert body["initial_worker_config"]["max_workers"] == 100
    assert body["autoscaling_config"]["scale_to_zero"] is False
    assert (body["engine"], body["controller_cloud_config"]["cloud_provider"]) == ("vllm", "AWS")
    assert set(body) == set(DeploymentIn.model_fields)
    assert set(body["initial_worker_config"]) == set(WorkerConfig.model_fields)
    assert set(body["autoscaling_config"]) == set(AutoscalingConfig.model_fields)
    assert set(wanted.columns) == set(COLUMNS)


@pytest.mark.parametrize(
    ("body", "column", "value"),
    [
        (scaling(time_window_sec=60), "up_window_s", 60),
        (scaling(time_window_sec=60, scale_down_time_window_sec=90), "down_window_s", 90),
        (scaling(time_window_minutes=2), "down_window_s", 120),
        (scaling(time_window_minutes="2"), "up_window_s", 120),
        (scaling(scale_to_zero_timeout_min=3), "idle_timeout_s", 180),
        (scaling(scaling_timeout_min=4), "start_timeout_s", 240),
        (scaling(scaling_timeout_min=4), "drain_timeout_s", 240),
        (scaling(scale_up_time_window_sec="300"), "up_window_s", 300),
        (scaling(scale_up_time_window_sec=300.0), "up_window_s", 300),
        (scaling(upper_allowed_latency_sec=4), "upper_threshold", 4.0),
        (scaling(upper_allowed_latency_sec=4, upper_allowed_threshold=None), "upper_threshold", 4.0),
        (scaling(upper_allowed_latency_sec=4, upper_allowed_threshold=2), "upper_threshold", 2.0),
        (scaling(upper_allowed_latency_sec=4, autoscaling_strategy="rps_per_worker"), "upper_threshold", 1.0),
        (scaling(time_window_sec=60), "scale_to_zero", True),
        (scaling(time_window_sec=60, scale_to_zero=False), "scale_to_zero", False),
        ({**scaling(time_window_sec=60), "initial_worker_config": {"min_workers": 1}}, "scale_to_zero", False),
        ({**MINIMAL, "gateway_config": {"name": "AWS", "region": "eu"}}, "scale_to_zero", True),
        (workers(use_same_gpus_when_scaling=True), "use_other_gpus", False),
        (workers(use_same_gpus_when_scaling=True, use_other_gpus=True), "use_other_gpus", True),
        (workers(instance_types=["string", "a"]), "instance_types", ["a"]),
        (workers(on_prem_node_ids=None), "on_prem_node_ids", []),
        ({**MINIMAL, "max_throughput_rate": 3}, "min_throughput_rate", 3.0),
        ({**MINIMAL, "max_throughput_rate": 3, "min_throughput_rate": 2}, "min_throughput_rate", 2.0),
        ({**MINIMAL, "max_price_per_hour": 0}, "max_price_per_hour", None),
        ({**MINIMAL, "cloud_providers": ["AWS"]}, "cloud_providers", [{"name": "AWS", "regions": []}]),
        ({**MINIMAL, "inf_type": "embedding"}, "strategy", "rps_per_worker"),
        ({**scaling(autoscaling_strategy="ttft_latency_sec"), "inf_type": "embedding"}, "strategy", "rps_per_worker"),
        ({**MINIMAL, "autoscaling_config": None, "initial_worker_config": None}, "max_workers", 100),
        ({"name": "outer", "config": {"model": "m"}}, "title", "outer"),
        ({"name": "outer", "config": {"model": "m", "name": "inner"}}, "title", "inner"),
    ],
)  # fmt: skip
def test_aliases_and_defaults(body, column, value):
    assert normalise(body).columns[column] == value


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"model": "m"}, "name", "required"),
        ({"name": "n"}, "model", "required"),
        ({**MINIMAL, "model": ""}, "model", "at least 1"),
        (workers(min_workers=-1), "initial_worker_config.min_workers", "greater than or equal to 0"),
        (workers(max_workers=0), "initial_worker_config.max_workers", "greater than or equal to 1"),
        (workers(min_workers=5, max_workers=4), "initial_worker_config.max_workers", "at least min_workers, which is 5"),
        (workers(min_workers=True), "initial_worker_config.min_workers", "not a boolean"),
        (workers(use_on_prem="true"), "initial_worker_config.use_on_prem", "boolean"),
        (scaling(scale_up_time_window_sec=0), "autoscaling_config.scale_up_time_window_sec", "greater than or equal to 1"),
        (scaling(scale_up_time_window_sec=300.5), "autoscaling_config.scale_up_time_window_sec", "fractional"),
        (scaling(scaling_up_timeout_sec=-1), "autoscaling_config.scaling_up_timeout_sec", "greater than or equal to 0"),
        (scaling(lower_allowed_threshold=1), "autoscaling_config.lower_allowed_threshold", "below upper_allowed_threshold"),
        (scaling(autoscaling_strategy="cpu"), "autoscaling_config.autoscaling_strategy", "rps_per_worker"),
        ({**workers(min_workers=1), "autoscaling_config": {"scale_to_zero": True}}, "autoscaling_config.scale_to_zero",
         "min_workers must be 0"),
        ({**scaling(autoscaling_strategy="e2e_latency_sec"), "inf_type": "embedding"},
         "autoscaling_config.autoscaling_strategy", "rps_per_worker for embedding"),
        ({**scaling(autoscaling_strategy="e2e_latency_sec"), "engine": "nim"},
         "autoscaling_config.autoscaling_strategy", "ttft_latency_sec, rps_per_worker for llm and nim"),
        ({**MINIMAL, "engine": "tei"}, "engine", "vllm, nim, friendli for llm"),
        ({**MINIMAL, "inf_type": "vlm"}, "inf_type", "not supported by this server"),
        ({**MINIMAL, "inf_type": "asr"}, "inf_type", "'llm', 'embedding', 'tti' or 'vlm'"),
        ({**MINIMAL, "max_price_per_hour": -1}, "max_price_per_hour", "greater than or equal to 0"),
        ({**workers(min_workers=1), "min_throughput_rate": 2}, "initial_worker_config.min_workers", "min_throughput_rate"),
        ({**workers(initial_workers_gpu="A10G"), "min_throughput_rate": 2}, "initial_worker_config.initial_workers_gpu",
         "min_throughput_rate"),
        ({**MINIMAL, "controller_cloud_config": {"cloud_provider": "AWS", "region": "x"},
          "controller_on_prem_config": {}}, "controller_on_prem_config", "must be null"),
        ({**MINIMAL, "controller_cloud_config": {"cloud_provider": "NOBODY", "region": "x"}},
         "controller_cloud_config.cloud_provider", "DATACRUNCH"),
        ({**MINIMAL, "llm_loras": [{"name": "a"}]}, "llm_loras[0].hf_repo", "required"),
        ({**MINIMAL, "inf_type": "embedding", "llm_loras": [{"name": "a", "src": "x"}]},
         "llm_loras", "take no adapters"),
        ({**MINIMAL, "llm_loras": [{"name": "a", "src": "x"}, {"name": "a", "src": "y"}]}, "llm_loras[1].name", "differ"),
        ({**MINIMAL, "custom_chat_template": "{% if %}"}, "custom_chat_template", "line 1"),
        ({**MINIMAL, "custom_chat_template": "\n{{ x|nonsense }}"}, "custom_chat_template", "line 2: there is no filter"),
        ({**MINIMAL, "custom_chat_template": "(" * 30_000 + "{{" + "(" * 30_000}, "custom_chat_template", "Jinja"),
        ({**MINIMAL, "vllm_extra_args": "--dtype int3"}, "vllm_extra_args", "dtype"),
        ({**MINIMAL, "vllm_extra_args": "--max-num-seqs many"}, "vllm_extra_args", "whole number"),
        ({**MINIMAL, "vllm_extra_args": "--x 'y"}, "vllm_extra_args", "quotation mark"),
        ({**MINIMAL, "max_model_len": -1}, "max_model_len", "greater than or equal to 0"),
        ({**MINIMAL, "unknown": "x" * 70_000}, "body", "at most 65536"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_its_range(body, field, text):
    found = wrong(body)
    assert list(found) == [field]
    assert text in found[field]


def test_all_wrong_fields_are_named_at_once():
    found = wrong(
        {
            "model": "m",
            "initial_worker_config": {"min_workers": 3, "max_workers": "x"},
            "autoscaling_config": {"scale_to_zero": True, "scaling_up_timeout_sec": -1},
            "engine": "tei",
        }
    )
    assert set(found) == {
        "name", "initial_worker_config.max_workers", "autoscaling_config.scale_to_zero",
        "autoscaling_config.scaling_up_timeout_sec", "engine",
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"autoscaling_config": {"upper_allowed_threshold": "x", "lower_allowed_threshold": 3}},
        {"initial_worker_config": {"min_workers": "x", "max_workers": 1}},
        {"inf_type": 1, "engine": "tei"},
    ],
)
def test_a_right_field_is_not_blamed_for_the_default_of_a_wrong_one(fields):
    assert len(wrong({**MINIMAL, **fields})) == 1


def test_a_constant_expression_of_a_template_is_not_evaluated():
    assert normalise({**MINIMAL, "custom_chat_template": "{{ 'x'|center(10**12) }}{{ 9**9**9**9 }}"})


def test_arguments_of_vllm_become_engine_options():
    wanted = normalise(
        {
            **MINIMAL,
            "throughput_optimized": True,
            "vllm_extra_args": "--max_model_len=512 --max-num-seqs 16 --dtype half --api-key sk-1 --enforce-eager --x=1",
        }
    )
    assert wanted.engine_options == {
        "max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 4096, "dtype": "float16",
    }  # fmt: skip
    assert wanted.vendor_fields["vllm_extra_args"].split() == [
        "--max_model_len=512", "--max-num-seqs", "16", "--dtype", "half", "--api-key", "'***'", "--enforce-eager", "--x=1",
    ]  # fmt: skip
    assert wanted.vendor_fields["warnings"] == [
        f"vllm_extra_args: {flag} has no effect" for flag in ("--api-key", "--enforce-eager", "--x")
    ]


def test_the_programs_default_strategy_is_told_to_mean_nothing_for_embeddings():
    kept = normalise({**scaling(autoscaling_strategy="ttft_latency_sec"), "inf_type": "embedding"}).vendor_fields
    assert any("has no meaning for embeddings" in warning for warning in kept["warnings"])
    kept = normalise({**MINIMAL, "inf_type": "embedding"}).vendor_fields
    assert not any("has no meaning" in warning for warning in kept["warnings"])


def test_unknown_fields_are_kept_without_secrets():
    wanted = normalise(
        {
            **workers(colour="red", initial_workers_gpu="TPU"),
            "hf_token": "hf_1",
            "later": [{"my_api_key": "k"}, None],
            "llm_loras": [{"name": "a", "hf_repo": "o/a", "hf_token": "hf_2", "alpha": 1}],
        }
    )
    kept = wanted.vendor_fields
    assert kept["extra"] == {
        "later": [{"my_api_key": "***"}, None], "initial_worker_config": {"colour": "red"}, "llm_loras[0]": {"alpha": 1},
    }  # fmt: skip
    assert any("TPU is no known accelerator" in warning for warning in kept["warnings"])
    assert wanted.hub_token == "hf_1"
    assert [(lora.name, lora.token) for lora in wanted.loras] == [("a", "hf_2")]
    assert "hf_" not in json.dumps([wanted.columns, kept]).replace("hf_repo", "") + repr(wanted).replace("hf_repo", "")


@pytest.mark.parametrize(
    "name",
    [
        "Authorization", "access_key", "auth-key", "passphrase", "pwd", "bearer", "api_key", "HF_TOKEN", "ssh_key",
        "encryption_key", "signing-key", "auth_tokens", "hf_tokens",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    arguments = f"-H '{name}: s3cret' --{name} s3cret --extra='{{\"{name}\": \"s3cret\"}}' --port 80"
    kept = normalise({**MINIMAL, name: "s3cret", "vllm_extra_args": arguments}).vendor_fields
    assert kept["extra"] == {name: "***"}
    assert shlex.split(kept["vllm_extra_args"]) == ["-H", "***", f"--{name}", "***", "--extra=***", "--port", "80"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--api-key s3cret-1 s3cret-2 --port 80", ["--api-key", "***", "***", "--port", "80"]),
        ("--api-key=s3cret-1 s3cret-2", ["--api-key=***", "***"]),
        ("api-key s3cret-1 --port 80", ["api-key", "***", "--port", "80"]),
        ("word other --seed 1 2", ["word", "other", "--seed", "1", "2"]),
    ],
)
def test_every_word_behind_the_name_of_a_secret(arguments, shown):
    wanted = normalise({**MINIMAL, "vllm_extra_args": arguments})
    assert shlex.split(wanted.vendor_fields["vllm_extra_args"]) == shown
    assert "s3cret" not in json.dumps([wanted.columns, wanted.vendor_fields])


@pytest.mark.parametrize(
    "text", ["", "{", '{"a":NaN}', "{}x", "[]}", "\xff", "[" * 100_000, '{"a":' + "1" * 5000 + "}"]
)
def test_malformed_json(text):
    with pytest.raises(ApiError) as caught:
        decode_object(text.encode("latin-1"))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "1",
        '{"a":[1e999]}',
        '{"a":"\\u0000"}',
        '{"a":["\\ud800"]}',
        '{"\\u0000":1}',
        '{"a":' * 40 + "1" + "}" * 40,
    ],
)
def test_values_that_cannot_be_used(text):
    with pytest.raises(InvalidFields):
        decode_object(text.encode())


FINE = st.fixed_dictionaries(
    {"name": st.text(min_size=1, max_size=9), "model": st.sampled_from(["m", "o/m"])},
    optional={
        "inf_type": st.sampled_from(["llm", "embedding"]),
        "allow_spot_instances": st.booleans(),
        "max_price_per_hour": st.floats(0, 99),
        "max_model_len": st.integers(0, 4096),
        "throughput_optimized": st.booleans(),
        "initial_worker_config": st.fixed_dictionaries(
            {},
            optional={
                "max_workers": st.integers(8, 20), "min_workers": st.integers(0, 8), "use_on_prem": st.booleans(),
                "use_same_gpus_when_scaling": st.booleans(), "initial_workers_gpu": st.sampled_from(["A100", "T4", "X"]),
            },
        ),
        "autoscaling_config": st.fixed_dictionaries(
            {},
            optional={
                "time_window_sec": st.integers(1, 900), "upper_allowed_threshold": st.floats(3, 9),
                "upper_allowed_latency_sec": st.floats(3, 9), "scaling_timeout_min": st.integers(0, 90),
            },
        ),
        "vllm_extra_args": st.sampled_from(["", "--dtype float32", "--seed 1 --max-model-len 64", "--hf-token t --x"]),
        "unknown": JSON,
    },
)  # fmt: skip


@given(ANY_BODY)
def test_any_body_is_accepted_or_refused_by_field(body):
    try:
        wanted = normalise(body)
    except InvalidFields as error:
        refusal = error.body
    else:
        refusal = None
        assert set(wanted.columns) == set(COLUMNS)
    assert refusal is None or (refusal["detail"] and json.dumps(refusal))


@given(FINE)
def test_what_is_returned_creates_the_same_again(body):
    first = normalise(body)
    again = normalise(canonical(first.columns, first.vendor_fields))
    assert (again.columns, again.engine_options) == (first.columns, first.engine_options)
    unlike = {"extra", "warnings", "controller_cloud_config"}
    assert {k: v for k, v in again.vendor_fields.items() if k not in unlike} == {
        k: v for k, v in first.vendor_fields.items() if k not in unlike
    }


@given(FINE, st.text("abcdef", min_size=12, max_size=12))
def test_no_secret_is_kept(body, secret):
    marked = f"hf_{secret}"
    body |= {
        "hf_token": marked,
        "llm_loras": [{"name": "a", "hf_repo": "o/a", "hf_token": marked}]
        if body.get("inf_type", "llm") == "llm"
        else [],
        "hub_password": marked,
        "vllm_extra_args": f"--api-key {marked} --hf-token={marked}",
    }
    wanted = normalise(body)
    assert wanted.hub_token == marked
    assert marked not in json.dumps([wanted.columns, wanted.vendor_fields, wanted.engine_options]) + repr(wanted)
