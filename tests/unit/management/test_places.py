"""Where a deployment's workers may run: its placement fields as labels of machines, the preferred ones first."""

from __future__ import annotations

import pytest

from management.launchers.place import Place
from management.models import Deployment, Price, Worker
from management.places import gpus_of, left_of, place_of, price_at
from management.watched import Watched

A100 = "in(A100,A100_PCIE,A100_SXM,A100_PCIE_NVLINK,A100_SXM_NVLINK)"
AWS = {"name": "AWS", "regions": ["us-east-1", "us-west-2"]}
GCP = {"name": "GCP", "regions": []}


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({}, ({"market": "!spot"},)),
        ({"spot": True}, ({"market": "spot"}, {"market": "!spot"})),
        ({"use_on_prem": True}, ({"market": "onprem"},)),
        (
            {"use_on_prem": True, "on_prem_node_ids": ["rack1-07", "rack1-08"], "use_cloudburst": True, "spot": True},
            (
                {"market": "onprem", "onprem-node-id": "in(rack1-07,rack1-08)"},
                {"market": "spot"},
                {"market": "ondemand"},
            ),
        ),
        (
            {"cloud_providers": [AWS, GCP], "instance_types": ["p4d.24xlarge"]},
            (
                {
                    "market": "ondemand",
                    "provider": "AWS",
                    "region": "in(us-east-1,us-west-2)",
                    "node-type": "p4d.24xlarge",
                },
                {"market": "ondemand", "provider": "GCP", "node-type": "p4d.24xlarge"},
            ),
        ),
        ({"gpu_type": "L4", "expand_gpu_types": False}, ({"market": "!spot", "accelerator": "L4"},)),
        (
            {"gpu_type": "A100", "use_other_gpus": True},
            ({"market": "!spot", "accelerator": A100}, {"market": "!spot"}),
        ),
    ],
)
def test_the_preferred_machines_come_first(fields, choices):
    assert place_of(Deployment(**fields), (), None).choices == choices


@pytest.mark.parametrize("text", ["a b", "a),!in(b", "!spot", "", "x" * 64, "in(a)"])
def test_a_name_that_is_no_label_widens_nothing(text):
    """No machine has it: beside others it is left out, alone it leaves none."""
    wish = {"use_on_prem": True, "on_prem_node_ids": ["rack1", text]}
    assert place_of(Deployment(**wish), (), None).choices == ({"market": "onprem", "onprem-node-id": "rack1"},)
    assert place_of(Deployment(use_on_prem=True, on_prem_node_ids=[text]), (), None).choices == ()


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({}, 0),
        ({"gpu_type": "L4"}, 1),
        ({"gpus_per_worker": 2}, 2),
        ({"engine_options": {"tensor_parallel_size": 4}}, 4),
        ({"gpu_type": "L4", "gpus_per_worker": 8, "engine_options": {"tensor_parallel_size": 4}}, 8),
    ],
)
def test_all_accelerators_of_a_worker_are_on_one_machine(fields, gpus):
    assert gpus_of(Deployment(**fields)) == place_of(Deployment(**fields), (), None).gpus == gpus


TABLE = [
    Price(gpu_type="", price_per_hour=0.1),
    Price(gpu_type="", spot=True, price_per_hour=0.02),
    Price(gpu_type="L4", price_per_hour=0.7),
    Price(gpu_type="L4", provider="ONPREM", price_per_hour=0.3),
    Price(gpu_type="L4", provider="AWS", region="us", price_per_hour=0.6),
    Price(gpu_type="L4", provider="AWS", region="eu", price_per_hour=0.9),
    Price(gpu_type="L4", provider="AWS", spot=True, price_per_hour=0.2),
    Price(gpu_type="H100", provider="AWS", price_per_hour=3.0),
]
L4 = {"gpu_type": "L4", "expand_gpu_types": False}
IN_AWS = {"cloud_providers": [{"name": "AWS", "regions": []}]}


@pytest.mark.parametrize(
    ("fields", "left", "choices"),
    [
        ({}, 0.1, ({"market": "!spot"},)),
        ({}, 0.09, ()),
        ({"spot": True}, 0.09, ({"market": "spot"},)),
        ({**L4, **IN_AWS}, 0.65, ({"market": "ondemand", "provider": "AWS", "accelerator": "L4", "region": "us"},)),
        ({**L4, **IN_AWS, "gpus_per_worker": 2}, 0.65, ()),
        (
            {**L4, **IN_AWS, "spot": True, "use_on_prem": True, "use_cloudburst": True},
            0.65,
            (
                {"market": "onprem", "accelerator": "L4"},
                {"market": "spot", "provider": "AWS", "accelerator": "L4"},
                {"market": "ondemand", "provider": "AWS", "accelerator": "L4", "region": "us"},
            ),
        ),
        # The price of any provider is not that of each: AWS in Europe has one of its own.
        ({**L4}, 0.75, ({"market": "!spot", "accelerator": "L4", "provider": "AWS", "region": "us"},)),
        ({"gpu_type": "Z9000"}, 100.0, ()),
    ],
)
def test_with_a_price_limit_only_machines_of_known_prices_below_it_are_left(fields, left, choices):
    assert set(map(repr, place_of(Deployment(**fields), TABLE, left).choices)) >= set(map(repr, choices))
    for choice in place_of(Deployment(**fields), TABLE, left).choices:
        labels = {name: value for name, value in choice.items() if not value.startswith("!")}
        price = price_at(labels, gpus_of(Deployment(**fields)), TABLE)
        assert price is not None
        assert price <= left
    assert bool(choices) == bool(place_of(Deployment(**fields), TABLE, left).choices)


def test_the_price_of_a_machine_is_that_of_the_row_that_says_most_of_it():
    at = {"market": "ondemand", "accelerator": "L4", "provider": "AWS"}
    assert price_at(at | {"region": "eu"}, 2, TABLE) == 1.8
    assert price_at(at | {"region": "asia"}, 1, TABLE) == 0.7
    assert price_at(at | {"market": "spot"}, 1, TABLE) == 0.2
    assert price_at({"market": "onprem", "accelerator": "L4"}, 1, TABLE) == 0.3
    assert price_at(at, 0, TABLE) == 0.1
    assert price_at({"accelerator": "Z9000"}, 1, TABLE) is None


def test_what_is_left_is_what_the_others_do_not_cost():
    def watched(price: float, spare: bool = False) -> Watched:
        return Watched(Worker(price_per_hour=price, spare=spare), None, None, 0.0, 0.0)

    mine = [watched(0.5), watched(0.25), watched(9.0, spare=True)]
    assert left_of(Deployment(max_price_per_hour=1.0), mine) == 0.25
    assert left_of(Deployment(), mine) is None
    assert place_of(Deployment(), (), None) == Place(({"market": "!spot"},), 0)
