"""The released tritonclient and kserve packages, unmodified, over HTTP and gRPC. Each runs in a process of its own: their
generated messages cannot be imported together.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.smoke

PROMPT = "Question: What is the capital of Spain?\\nAnswer:"
COMMON = f"""
    import numpy as np
    PROMPT = {PROMPT.encode()!r}.decode().replace("\\\\n", "\\n")
    def text_inputs(module, stream=None, tokens=8):
        text = module.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
        most = module.InferInput("max_tokens", [1], "INT32")
        most.set_data_from_numpy(np.array([tokens], dtype=np.int32))
        heat = module.InferInput("temperature", [1], "FP32")
        heat.set_data_from_numpy(np.array([0.0], dtype=np.float32))
        inputs = [text, most, heat]
        if stream is not None:
            flag = module.InferInput("stream", [1], "BOOL")
            flag.set_data_from_numpy(np.array([stream], dtype=np.bool_))
            inputs.append(flag)
        return inputs
    def check(text):
        assert text.startswith(" The capital of Spain is Madrid"), text
"""


def test_http(run_protocol_client):
    run_protocol_client(
        COMMON
        + """
    import tritonclient.http as http
    from tritonclient.utils import InferenceServerException
    client = http.InferenceServerClient(HOST)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("demo")
    assert not client.is_model_ready("nothing")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.get_model_metadata("demo")["outputs"][0]["name"] == "text_output"
    assert client.get_model_config("demo", "1")["model_transaction_policy"]["decoupled"]
    check(client.infer("demo", text_inputs(http)).as_numpy("text_output")[0].decode())
    outputs = [http.InferRequestedOutput("text_output", binary_data=False)]
    check(str(client.infer("demo", text_inputs(http), outputs=outputs, request_id="a1").as_numpy("text_output")[0]))
    ids = http.InferInput("input0", [1, 3], "UINT32")
    ids.set_data_from_numpy(np.array([[364, 367, 259]], dtype=np.uint32), binary_data=False)
    result = client.infer("demo", [ids], parameters={"max_tokens": 4, "temperature": 0.0}, request_id="b",
                          request_compression_algorithm="gzip", response_compression_algorithm="gzip")
    assert result.as_numpy("output0").shape == (1, 4) and result.get_response()["id"] == "b"
    for call in (lambda: client.infer("nothing", [ids]), lambda: client.infer("demo", [ids], parameters={"top_p": 7.0}),
                 lambda: client.infer("demo", [ids], outputs=[http.InferRequestedOutput("x")])):
        try:
            call()
        except InferenceServerException as error:
            assert error.message() and error.status() in ("400", "404"), error
        else:
            raise AssertionError("accepted")
    assert client.get_inference_statistics("demo")["model_stats"][0]["inference_count"] >= 3
    assert [m for m in client.get_model_repository_index() if m["name"] == "demo"][0]["state"] == "READY"
    assert client.get_trace_settings("demo")["trace_level"] == ["OFF"] and client.get_log_settings()["log_info"]
    assert client.update_trace_settings(settings={"trace_rate": None}) == client.get_trace_settings()
    assert client.get_system_shared_memory_status() == client.get_cuda_shared_memory_status() == []
    for call, status in ((lambda: client.unregister_system_shared_memory(), "501"),
                         (lambda: client.register_system_shared_memory("a", "/a", 8), "501"),
                         (lambda: client.get_system_shared_memory_status("a"), "404"),
                         (lambda: client.update_log_settings({"log_verbose_level": 1}), "503")):
        try:
            call()
        except InferenceServerException as error:
            assert error.status() == status, error
        else:
            raise AssertionError("accepted")
    client.load_model("demo")
    futures = [client.async_infer("demo", text_inputs(http)) for _ in range(4)]
    for future in futures:
        check(future.get_result().as_numpy("text_output")[0].decode())
    """
    )


def test_http_asynchronous(run_protocol_client):
    run_protocol_client(
        COMMON
        + """
    import asyncio
    import tritonclient.http.aio as http
    async def main():
        async with http.InferenceServerClient(HOST) as client:
            assert await client.is_model_ready("demo")
            results = await asyncio.gather(*(client.infer("demo", text_inputs(http)) for _ in range(8)))
            for result in results:
                check(result.as_numpy("text_output")[0].decode())
    asyncio.run(main())
    """
    )


def test_grpc(run_protocol_client):
    run_protocol_client(
        COMMON
        + """
    import queue
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException
    client = grpc.InferenceServerClient(GRPC)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("demo")
    assert not client.is_model_ready("nothing")
    assert "statistics" in client.get_server_metadata().extensions
    assert client.get_model_metadata("demo", as_json=True)["versions"] == ["1"]
    assert client.get_model_config("demo").config.model_transaction_policy.decoupled
    check(client.infer("demo", text_inputs(grpc), request_id="r").as_numpy("text_output")[0].decode())
    assert client.get_inference_statistics("demo").model_stats[0].inference_count >= 1
    assert "demo" in [model.name for model in client.get_model_repository_index().models]
    try:
        client.infer("nothing", text_inputs(grpc))
    except InferenceServerException as error:
        assert error.status() == "StatusCode.NOT_FOUND", error
    else:
        raise AssertionError("found")
    assert list(client.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    assert client.get_log_settings().settings["log_error"].bool_param
    assert not client.get_cuda_shared_memory_status().regions
    for call, status in ((lambda: client.unregister_system_shared_memory(), "UNIMPLEMENTED"),
                         (lambda: client.get_system_shared_memory_status("a"), "NOT_FOUND"),
                         (lambda: client.update_trace_settings(settings={"trace_rate": "5"}), "UNAVAILABLE")):
        try:
            call()
        except InferenceServerException as error:
            assert error.status() == f"StatusCode.{status}", error
        else:
            raise AssertionError("accepted")
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    texts = []
    for attempt in range(50):  # tokens that come at the same time share a response, on a busy machine even all of them
        client.async_stream_infer("demo", text_inputs(grpc, stream=True), request_id="s1", enable_empty_final_response=True)
        texts.clear()
        while True:
            result, error = answers.get(timeout=60)
            assert error is None, error
            texts.append(result.as_numpy("text_output")[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        if len(texts) > 1:
            break
    assert len(texts) > 1
    check("".join(texts))
    client.async_stream_infer("nothing", text_inputs(grpc))
    result, error = answers.get(timeout=60)
    assert "unknown model" in str(error)
    for i in range(4):
        client.async_stream_infer("demo", text_inputs(grpc, stream=False), request_id=str(i))
    assert {answers.get(timeout=60)[0].get_response().id for _ in range(4)} == {"0", "1", "2", "3"}
    client.stop_stream()
    """
    )


def test_grpc_cancellation(run_protocol_client, server):
    run_protocol_client(
        COMMON
        + """
    import queue, time
    import tritonclient.grpc as grpc
    client = grpc.InferenceServerClient(GRPC)
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = text_inputs(grpc, stream=True, tokens=2000)
    client.async_stream_infer("demo", inputs, parameters={"ignore_eos": True})
    answers.get(timeout=60)
    client.stop_stream(cancel_requests=True)
    """
    )
    server.wait_idle()


def test_kserve_rest(run_protocol_client):
    run_protocol_client("""
        import asyncio
        from kserve import InferenceRESTClient, InferRequest, InferInput
        from kserve.inference_client import RESTConfig
        async def main():
            client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
            assert await client.is_server_ready(URL) and await client.is_server_live(URL)
            assert await client.is_model_ready(URL, "demo")
            text = InferInput("text_input", [1], "BYTES", data=["Hello"])
            request = InferRequest("demo", [text], parameters={"max_tokens": 4, "temperature": 0.0})
            answer = await client.infer(URL, request, model_name="demo")
            assert answer.outputs[0].name == "text_output" and answer.model_name == "demo", answer
            assert len(answer.outputs[0].data) == 1
        asyncio.run(main())
    """)


def test_kserve_grpc(run_protocol_client):
    run_protocol_client("""
        import asyncio
        import numpy as np
        from kserve import InferenceGRPCClient, InferRequest, InferInput
        async def main():
            client = InferenceGRPCClient(GRPC, timeout=60)
            assert await client.is_server_ready() and await client.is_server_live()
            assert await client.is_model_ready("demo")
            ids = InferInput("input0", [1, 3], "UINT32")
            ids.set_data_from_numpy(np.array([[364, 367, 259]], dtype=np.uint32))
            request = InferRequest("demo", [ids], parameters={"max_tokens": 4, "do_sample": False})
            answer = await client.infer(request)
            assert answer.outputs[0].as_numpy().shape == (1, 4), answer
        asyncio.run(main())
    """)
