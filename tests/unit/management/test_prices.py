"""What a worker costs: the cheapest row of the price table that its placement allows."""

from __future__ import annotations

import pytest

from management.models import Deployment, Price
from management.places import least_price

TABLE = [
    Price(gpu_type="", price_per_hour=0.1),
    Price(gpu_type="L4", price_per_hour=0.7),
    Price(gpu_type="L4", provider="AWS", region="us", price_per_hour=0.6),
    Price(gpu_type="L4", provider="AWS", region="eu", price_per_hour=0.9),
    Price(gpu_type="L4", provider="GCP", price_per_hour=0.5),
    Price(gpu_type="L4", spot=True, price_per_hour=0.2),
    Price(gpu_type="H100", provider="AWS", price_per_hour=3.0),
    Price(gpu_type="A10_PCIE", price_per_hour=1.1),
    Price(gpu_type="A10", provider="ONPREM", price_per_hour=0.3),
    Price(gpu_type="A10", price_per_hour=1.2),
]


@pytest.mark.parametrize(
    ("fields", "price"),
    [
        ({}, 0.1),
        ({"gpu_type": "L4"}, 0.5),
        ({"gpu_type": "L4", "spot": True}, 0.2),
        ({"gpu_type": "L4", "gpus_per_worker": 4}, 2.0),
        ({"gpu_type": "L4", "cloud_providers": [{"name": "AWS", "regions": ["us"]}]}, 0.6),
        (
            {"gpu_type": "L4", "cloud_providers": [{"name": "AWS", "regions": ["eu"]}]},
            0.9,
        ),  # the more precise of two rows counts
        ({"gpu_type": "H100", "cloud_providers": [{"name": "AWS", "regions": []}]}, 3.0),
        ({"gpu_type": "H100", "cloud_providers": [{"name": "GCP", "regions": []}]}, None),
        ({"gpu_type": "Z9000"}, None),
        ({"gpu_type": "L4", "engine_options": {"tensor_parallel_size": 4}}, 2.0),  # which takes four of them
        ({"gpu_type": "A10", "cloud_providers": [{"name": "AWS", "regions": []}]}, 1.1),  # a variant
        ({"gpu_type": "A10", "cloud_providers": [{"name": "AWS", "regions": []}], "expand_gpu_types": False}, 1.2),
        ({"gpu_type": "A10", "use_on_prem": True}, 0.3),
    ],
)
def test_the_cheapest_allowed_row_counts(fields, price):
    assert least_price(Deployment(**fields), TABLE) == price
