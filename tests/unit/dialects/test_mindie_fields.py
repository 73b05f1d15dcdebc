"""What MindIE's routes accept and refuse, in the vendor's words; and values that a client sends back."""

from __future__ import annotations

from tests.unit.scripts import says


async def test_a_seed_that_the_server_chose_can_be_sent_back(serving):
    """MindIE draws 32 bits and accepts 63."""
    for _ in range(20):
        serving.worker.scripts += [says(" Rome."), says(" Rome.")]
        body = {"inputs": "The capital", "parameters": {"details": True}}
        seed = (await serving.post("/infer", body, plane="mindie")).json()["details"]["seed"]
        assert 0 <= seed < 1 << 32
        body["parameters"]["seed"] = seed
        again = await serving.post("/infer", body, plane="mindie")
        assert (again.status, again.json()["details"]["seed"]) == (200, seed)
