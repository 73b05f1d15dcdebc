"""Bodies that hypothesis makes up: known fields with any values."""

from __future__ import annotations

from hypothesis import strategies as st

from management.api.scalegenai.schema import AutoscalingConfig, DeploymentIn, WorkerConfig

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2000) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ALIASES = ("time_window_sec", "time_window_minutes", "scale_to_zero_timeout_min", "scaling_timeout_min", "x")


def sections(*names):
    return st.dictionaries(st.sampled_from(names), JSON | st.integers(0, 400), max_size=5)


ANY_BODY = st.fixed_dictionaries(
    {},
    optional={
        **{name: JSON for name in (*DeploymentIn.model_fields, "gateway_config", "config", "max_throughput_rate", "z")},
        "name": st.text(max_size=5) | JSON,
        "model": st.text(max_size=5) | JSON,
        "autoscaling_config": sections(*AutoscalingConfig.model_fields, *ALIASES) | JSON,
        "initial_worker_config": sections(*WorkerConfig.model_fields, "use_same_gpus_when_scaling", "x") | JSON,
        "controller_cloud_config": sections("cloud_provider", "region", "api_gateway_data") | JSON,
        "llm_loras": st.lists(sections("name", "hf_repo", "src", "hf_token") | JSON, max_size=3) | JSON,
    },
)
