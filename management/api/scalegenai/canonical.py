"""The vendor's canonical fields of a deployment, from its columns: the inverse of the normaliser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from management.api.scalegenai.schema import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Mapping

# The vendor's own defaults for records without a controller.
DEFAULT_CONTROLLER = {
    "public_url": True,
    "use_ssl": True,
    "use_api_gateway": False,
    "vpc_id": None,
    "cloud_provider": "AWS",
    "region": "us-east-1",
    "api_gateway_data": None,
}


def canonical(columns: Mapping[str, Any], vendor_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a create under its newest name. `columns` are as in `Wanted`; without `vendor_fields`, which is so for
    deployments that another interface created, the vendor's defaults stand. Secrets are null.
    """
    kept = vendor_fields.get
    kind = columns["inference_kind"]
    on_prem = kept("controller_on_prem_config")
    return {
        "name": columns["title"],
        "model": kept("model"),
        "base_model": kept("base_model"),
        "inf_type": kind,
        "hf_token": None,
        "engine": kept("engine") or next(iter(STRATEGIES[kind])),
        "custom_chat_template": columns["chat_template"] or None,
        "allow_spot_instances": columns["spot"],
        "logs_store": kept("logs_store"),
        "cloud_providers": columns["cloud_providers"],
        "initial_worker_config": {
            "min_workers": columns["min_workers"],
            "initial_workers_gpu": columns["gpu_type"] or None,
            "initial_workers_gpu_num": columns["gpus_per_worker"] or None,
            "use_other_gpus": columns["use_other_gpus"],
            "instance_types": columns["instance_types"],
            "use_on_prem": columns["use_on_prem"],
            "use_cloudburst": columns["use_cloudburst"],
            "on_prem_node_ids": columns["on_prem_node_ids"],
            "expand_gpu_types": columns["expand_gpu_types"],
            "max_workers": columns["max_workers"],
            "wait_for_preprov_nodes": kept("wait_for_preprov_nodes", False),
        },
        "autoscaling_config": {
            "scale_up_time_window_sec": columns["up_window_s"],
            "scale_down_time_window_sec": columns["down_window_s"],
            "scaling_up_timeout_sec": columns["start_timeout_s"],
            "scaling_down_timeout_sec": columns["drain_timeout_s"],
            "scale_to_zero_timeout_sec": columns["idle_timeout_s"],
            "enable_speedup_shared": columns["share_while_starting"],
            "enable_fast_autoscaling": columns["fast_autoscaling"],
            "scale_to_zero": columns["scale_to_zero"],
            "autoscaling_strategy": columns["strategy"],
            "upper_allowed_threshold": columns["upper_threshold"],
            "lower_allowed_threshold": columns["lower_threshold"],
            "upper_allowed_latency_sec": kept("upper_allowed_latency_sec", 1.0),
            "lower_allowed_latency_sec": kept("lower_allowed_latency_sec", 0.2),
        },
        "max_price_per_hour": columns["max_price_per_hour"],
        "min_throughput_rate": columns["min_throughput_rate"],
        "controller_cloud_config": kept("controller_cloud_config") or (None if on_prem else dict(DEFAULT_CONTROLLER)),
        "controller_on_prem_config": on_prem,
        "llm_loras": [{**each, "hf_token": None} for each in kept("llm_loras", ())],
        "max_model_len": kept("max_model_len"),
        "throughput_optimized": kept("throughput_optimized", False),
        "agentic_deployment": kept("agentic_deployment", False),
        "vllm_extra_args": kept("vllm_extra_args"),
    }
