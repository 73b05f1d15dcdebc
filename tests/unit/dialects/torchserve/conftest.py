"""TorchServe's services over a Unix socket and its planes, with fake workers behind them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from inference.dialects.torchserve import grpc_inference, grpc_management
from inference.dialects.torchserve.grpc_inference import InferenceService
from inference.dialects.torchserve.grpc_management import ManagementService
from inference.dialects.torchserve.grpc_open_inference import OpenInferenceService
from inference.dialects.torchserve.key_file import KeyFile
from inference.dialects.torchserve.protocol import inference_pb2 as infer
from inference.dialects.torchserve.protocol import management_pb2 as manage
from inference.dialects.torchserve.routes import answer_headers, route_sets
from inference.dialects.torchserve.settings import TorchServeSettings
from inference.dialects.torchserve.state import State
from inference.dialects.torchserve.tokens import TokenAuthenticator
from inference.http.routing import RouteTable
from inference.planes.plane import Plane
from inference.server.grpc_calls import Timeouts
from inference.server.grpc_standard import standard_services
from tests.unit.dialects.torchserve.registry import Versions
from tests.unit.serving import Serving


@dataclass
class Server:
    """The server of a test, and a client."""

    serving: Serving
    registry: Versions
    state: State
    channel: grpc.aio.Channel

    async def manage(self, method: str, **fields: Any) -> str:
        """The `msg` of a management call."""
        request = getattr(manage, f"{method}Request")(**fields)
        call = self.channel.unary_unary(
            f"/{grpc_management.SERVICE}/{method}",
            lambda m: m.SerializeToString(),
            manage.ManagementResponse.FromString,
        )
        return (await call(request, timeout=10, metadata=self.metadata)).msg

    async def described(self, **fields: Any) -> Any:
        return json.loads(await self.manage("DescribeModel", **fields))

    async def predict(self, model: str = "demo", version: str = "", **values: bytes) -> bytes:
        """The answer of Predictions."""
        call = self.channel.unary_unary(
            f"/{grpc_inference.SERVICE}/Predictions",
            lambda m: m.SerializeToString(),
            infer.PredictionResponse.FromString,
        )
        return (await call(self.asked(model, version, **values), timeout=10, metadata=self.metadata)).prediction

    def stream(self, model: str = "demo", version: str = "", **values: bytes) -> Any:
        """A running call of StreamPredictions."""
        call = self.channel.unary_stream(
            f"/{grpc_inference.SERVICE}/StreamPredictions",
            lambda m: m.SerializeToString(),
            infer.PredictionResponse.FromString,
        )
        return call(self.asked(model, version, **values), timeout=10, metadata=self.metadata)

    def sequences(self, requests: Any) -> Any:
        """A running call of StreamPredictions2."""
        call = self.channel.stream_stream(
            f"/{grpc_inference.SERVICE}/StreamPredictions2",
            lambda m: m.SerializeToString(),
            infer.PredictionResponse.FromString,
        )
        return call(requests, timeout=10, metadata=self.metadata)

    @staticmethod
    def asked(model: str = "demo", version: str = "", sequence: str | None = None, **values: bytes) -> Any:
        return infer.PredictionsRequest(
            model_name=model, model_version=version, input=values, **({"sequence_id": sequence} if sequence else {})
        )

    metadata: tuple[tuple[str, str], ...] = (("protocol", "gRPC"), ("session_id", "12345"))

    @property
    def worker(self) -> Any:
        """The first worker of the first version."""
        return self.registry.fakes[self.registry.states[0].name][0]


@pytest.fixture
async def begin(start, sockets):
    """Begin to serve with such settings as the test names; `demo` is registered with a worker unless told otherwise."""
    running = []

    async def make(with_demo: bool = True, keys: KeyFile | None = None, **settings: Any) -> Server:
        serving = await start(0)
        registry = Versions(serving, sockets)
        services = replace(serving.services, registry=registry)
        authenticator = services.authenticator if keys is None else TokenAuthenticator(keys, services.authenticator)
        named = {f"torchserve_{name}": value for name, value in settings.items()}
        state = State(TorchServeSettings(**named), services, authenticator, keys)
        services.generator.observers.append(state.metrics)
        for name, routes in route_sets(state).items():
            table = RouteTable([routes])
            serving.planes[f"ts-{name}"] = Plane(name, table, services, authenticator, answer_headers)
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 6_553_500)])
        timeouts = Timeouts(5, 5)
        handlers = [InferenceService(state, timeouts).handler(), ManagementService(state, timeouts).handler()]
        handlers.append(OpenInferenceService(state, timeouts).handler())
        names = [grpc_inference.SERVICE, grpc_management.SERVICE]
        handlers += standard_services(names, lambda: state.healthy, services, timeouts)
        server.add_generic_rpc_handlers(handlers)
        server.add_insecure_port(f"unix:{sockets}/grpc.sock")
        await server.start()
        channel = grpc.aio.insecure_channel(f"unix:{sockets}/grpc.sock")
        made = Server(serving, registry, state, channel)
        running.append((server, made))
        if with_demo:
            await made.registry.create_deployment(demo(), "test")
            await serving.connected(1)
        return made

    yield make
    for server, made in running:
        await made.channel.close()
        await server.stop(0)
        await made.registry.close()


def demo():
    from inference.workers.registry import NewDeployment

    return NewDeployment(("demo",), "demo", "1.0", workers=1)


@pytest.fixture
async def server(begin):
    """One model, demo 1.0, with a worker."""
    return await begin()


@pytest.fixture
async def empty(begin):
    """No model."""
    return await begin(with_demo=False)
