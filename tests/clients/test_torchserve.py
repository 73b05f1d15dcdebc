"""TorchServe's clients: stubs generated from .proto files, every call of both services; and OpenAI's client below a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap

import pytest

from tests import calls
from tests.conftest import ROOT
from tests.live import LiveServer, free_port

PROTOCOL = ROOT / "inference" / "dialects" / "torchserve" / "protocol"
CLIENTS_PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PROMPT = "Question: What is the capital of Spain?\nAnswer:"
COMMON = """
    import json
    import sys
    import grpc
    import inference_pb2, inference_pb2_grpc, management_pb2, management_pb2_grpc
    from google.protobuf.empty_pb2 import Empty
    INFERENCE, MANAGEMENT, PROMPT = sys.argv[1], sys.argv[2], sys.argv[3].encode()
    METADATA = (("protocol", "gRPC"), ("session_id", "12345"), *(("authorization", f"Bearer {key}") for key in sys.argv[4:5]))
    infer = inference_pb2_grpc.InferenceAPIsServiceStub(grpc.insecure_channel(INFERENCE))
    manage = management_pb2_grpc.ManagementAPIsServiceStub(grpc.insecure_channel(MANAGEMENT))

    def call(name, **fields):
        request = getattr(management_pb2, f"{name}Request")(**fields)
        return getattr(manage, name)(request, metadata=METADATA, timeout=120).msg

    def refused(function, code, text):
        try:
            function()
        except grpc.RpcError as error:
            assert (error.code().name, error.details().split("\\n")[0]) == (code, text), error
        else:
            raise AssertionError("accepted")

    def asked(model, sequence=None, **values):
        return inference_pb2.PredictionsRequest(model_name=model, input=values, sequence_id=sequence)

    def predict(model, **values):
        return infer.Predictions(asked(model, **values), metadata=METADATA, timeout=60).prediction.decode()
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Flat modules, as TorchServe's documentation has them generated. They cannot be imported beside the server's own."""
    folder = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", sysconfig.get_path("purelib"), "-I", str(PROTOCOL)]
    files = ["inference.proto", "management.proto"]
    subprocess.run([*command, f"--python_out={folder}", f"--grpc_python_out={folder}", *files], check=True)
    return folder


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    rest = {name: str(free_port()) for name in ("INFERENCE", "MANAGEMENT", "METRICS")}
    environment = {f"DRAGOMAN_TORCHSERVE_{name}_PORT": port for name, port in rest.items()}
    started = LiveServer(tmp_path_factory.mktemp("torchserve") / "var", environment=environment).start()
    yield started
    assert started.stop() == 0, started.log


@pytest.fixture
def run(stubs):
    def run_program(live, program, *keys):
        code = textwrap.dedent(COMMON) + textwrap.dedent(program)
        addresses = [f"127.0.0.1:{live.torchserve_inference_port}", f"127.0.0.1:{live.torchserve_management_port}"]
        command = [sys.executable, "-W", "ignore", "-c", code, *addresses, PROMPT, *keys]
        environment = {**os.environ, "PYTHONPATH": str(stubs)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + live.log[-2000:]

    return run_program


def url(live, plane, path):
    return f"http://127.0.0.1:{live.environment[f'DRAGOMAN_TORCHSERVE_{plane}_PORT']}{path}"


@pytest.mark.smoke
def test_predictions(live, run):
    run(live, """
    assert infer.Ping(Empty(), metadata=METADATA).health == '{\\n  "status": "Healthy"\\n}'
    text = predict("demo", data=PROMPT, max_tokens=b"8", temperature=b"0")
    assert text.startswith(" The capital of Spain is Madrid"), text
    answer = json.loads(predict("demo", body=json.dumps({"prompt": PROMPT.decode(), "max_tokens": 8, "temperature": 0}).encode()))
    assert answer == {"text": text, "finish_reason": "length"}, answer
    chat = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    assert json.loads(predict("demo", data=chat, url_path=b"v1/chat/completions"))["object"] == "chat.completion"
    stream = infer.StreamPredictions(asked("demo", data=PROMPT, max_tokens=b"8", temperature=b"0"), metadata=METADATA)
    pieces = [piece.prediction.decode() for piece in stream]
    assert "".join(pieces) == text and len(pieces) == 8, pieces
    same = dict(data=PROMPT, max_tokens=b"8", temperature=b"0")
    requests = [asked("demo", f"seq_{n % 2}", **same) for n in range(4)] + [asked("none", "seq_0", data=b"a"), asked("demo", data=b"a")]
    answers = list(infer.StreamPredictions2(iter(requests), metadata=METADATA))
    assert sorted(a.prediction.decode() for a in answers) == ["", "", *[text] * 4], answers
    messages = {a.status.message for a in answers if a.HasField("status")}
    assert messages == {"Model not found: none", "Parameter sequenceId is required."}, messages
    refused(lambda: predict("none", data=b"a"), "INTERNAL", "Model not found: none")
    refused(lambda: predict("demo", data=b"\\xff\\xd8"), "INVALID_ARGUMENT", "input `data` is not valid UTF-8: this model reads text")
    """)  # fmt: skip


def test_the_life_of_a_model(live, run):
    run(live, """
    S3 = "https://torchserve.s3.amazonaws.com/mar_files/"
    said = call("RegisterModel", url=S3 + "demo.mar", model_name="second", initial_workers=1, synchronous=True, batch_size=4)
    assert said == 'Model "second" Version: 1.0 registered with 1 initial workers', said
    refused(lambda: call("RegisterModel", url=S3 + "demo.mar", model_name="second"), "INTERNAL", "Model file already exists demo.mar")
    text = "Model version 1.0 is already registered for model second"
    refused(lambda: call("RegisterModel", url="demo.mar", model_name="second"), "ALREADY_EXISTS", text)
    assert predict("second", data=PROMPT, max_tokens=b"8", temperature=b"0").startswith(" The capital of Spain is Madrid")
    (found,) = json.loads(call("DescribeModel", model_name="second"))
    assert (found["batchSize"], found["modelUrl"], found["minWorkers"]) == (4, S3 + "demo.mar", 1), found
    (worker,) = found["workers"]
    assert worker["status"] == "READY" and worker["memoryUsage"] > 1 << 20 and worker["pid"] > 1, worker
    (found,) = json.loads(call("DescribeModel", model_name="second", customized=True))
    assert found["customizedMetadata"]["max_model_len"] == 2048
    listed = json.loads(call("ListModels"))
    assert [model["modelName"] for model in listed["models"]] == ["demo", "second"], listed
    said = call("RegisterModel", url="demo", model_name="third")
    assert "registered with 0 initial workers" in said, said
    text = 'Model "third" has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize'
    refused(lambda: predict("third", data=b"a"), "INTERNAL", text)
    said = call("ScaleWorker", model_name="third", min_worker=1, synchronous=True)
    assert said == "Workers scaled to 1 for model: third", said
    assert predict("third", data=PROMPT, max_tokens=b"2")
    (version,) = json.loads(call("DescribeModel", model_name="third", model_version="all"))
    said = call("SetDefault", model_name="third", model_version=version["modelVersion"])
    assert said.startswith('Default version successfully updated for model "third"'), said
    refused(lambda: call("SetDefault", model_name="third", model_version="0.0"), "NOT_FOUND", "Model version 0.0 does not exist for model third")
    for name in ("second", "third"):
        assert call("UnregisterModel", model_name=name) == f'Model "{name}" unregistered'
    refused(lambda: call("UnregisterModel", model_name="second"), "NOT_FOUND", "Model not found: second")
    refused(lambda: call("RegisterModel", url=S3 + "none.mar"), "INVALID_ARGUMENT", f"Failed to download archive from: {S3}none.mar")
    said = call("RegisterModel", url=S3 + "demo.mar", model_name="second")
    assert call("UnregisterModel", model_name="second") == 'Model "second" unregistered'
    """)  # fmt: skip


def test_a_message_that_is_too_long_is_refused_unread(live, run):
    run(
        live,
        """
    try:
        predict("demo", data=b"a" * 6_553_501)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
    else:
        raise AssertionError("accepted")
    """,
    )


def test_standard_services(live, run):
    run(
        live,
        """
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    for address in (INFERENCE, MANAGEMENT):
        stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address))
        assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
    """,
    )


def test_rest(live):
    answer = calls.get(url(live, "INFERENCE", "/ping"))
    assert (answer.status_code, answer.json()) == (200, {"status": "Healthy"})
    answer = calls.post(url(live, "INFERENCE", "/predictions/demo"), files={"data": PROMPT.encode()}, timeout=60)
    assert answer.text.startswith(" The capital of Spain is Madrid")
    answer = calls.get(url(live, "MANAGEMENT", "/models/none"))
    assert answer.json() == {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: none"}
    answer = calls.get(url(live, "METRICS", "/metrics"))
    assert 'ts_inference_requests_total{model_name="demo"' in answer.text


def test_openais_client_below_a_model(live):
    (described,) = calls.get(url(live, "MANAGEMENT", "/models/demo")).json()
    base = url(live, "INFERENCE", f"/predictions/demo/{described['modelVersion']}/v1")
    program = f"""
    import openai
    client = openai.OpenAI(api_key="none", base_url={base!r})
    assert client.models.list().data
    text = client.completions.create(model="demo", prompt={PROMPT!r}, max_tokens=8, temperature=0).choices[0].text
    assert text.startswith(" The capital of Spain is Madrid"), text
    stream = client.completions.create(model="demo", prompt={PROMPT!r}, max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    try:
        client.completions.create(model="none", prompt="a")
    except openai.NotFoundError:
        pass
    else:
        raise AssertionError("accepted")
    """
    command = [CLIENTS_PYTHON, "-W", "ignore", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_keys(tmp_path, run):
    environment = {"DRAGOMAN_TORCHSERVE_TOKEN_AUTHORIZATION": "on", "DRAGOMAN_TORCHSERVE_KEY_FOLDER": str(tmp_path)}
    live = LiveServer(tmp_path / "var", environment=environment).start()
    keys = json.loads((tmp_path / "key_file.json").read_text())
    run(live, 'assert json.loads(call("ListModels"))["models"]', keys["management"]["key"])
    run(live, 'assert predict("demo", data=PROMPT, max_tokens=b"2")', keys["inference"]["key"])
    text = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
    run(live, f'refused(lambda: call("ListModels"), "PERMISSION_DENIED", {text!r})', keys["inference"]["key"])
    run(live, f'refused(lambda: predict("demo", data=b"a"), "PERMISSION_DENIED", {text!r})')
    assert live.stop() == 0
    assert not (tmp_path / "key_file.json").exists()
