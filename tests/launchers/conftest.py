"""One launcher after another: what each of them must do, they must do alike."""

from __future__ import annotations

import importlib.util

import pytest

from management.launchers.leased import LeasedLauncher
from management.launchers.network import Network
from tests.certificates import Authority, credentials
from tests.live import OWN_PORTS

KINDS = ("local", "ray")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    authority = Authority()
    folder = tmp_path_factory.mktemp("tls")
    return Network("127.0.0.1", OWN_PORTS, credentials(folder, authority, authority.issue()))


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs and one node; the launcher's variables lead there."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: dragoman[ray]")
    from tests.ray_cluster import RayCluster

    made = RayCluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.client.items():
            patch.setenv(name, value)
        try:
            made.start_head()
            made.add_node(cpus=2, gpus=2, labels={"market": "spot", "accelerator": "L4"})
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module", params=KINDS)
def make(request, tmp_path_factory, network):
    """Makes launchers of one kind, each as another reconciler's."""
    folder = tmp_path_factory.mktemp("run")
    if request.param == "ray":
        request.getfixturevalue("cluster")
        from management.launchers.ray.launcher import RayLauncher

        return lambda: RayLauncher(network)
    return lambda: LeasedLauncher(folder, Network())
