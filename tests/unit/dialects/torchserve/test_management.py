"""The management of models over gRPC: every call, its sentence, and each refusal."""

from __future__ import annotations

import asyncio
import json
import os
import zipfile
from dataclasses import replace

import grpc
import pytest

from inference.dialects.torchserve.archives import read_archive
from inference.dialects.torchserve.errors import TorchServeError
from inference.dialects.torchserve.management import Registration, register
from inference.workers.registry import NewDeployment
from tests.waiting import eventually

ARCHIVE, HTTP = "org.pytorch.serve.archive.model.", "org.pytorch.serve.http."
S3 = "https://torchserve.s3.amazonaws.com/mar_files/"


async def refused(call) -> tuple[str, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    text, _, label = caught.value.details().partition("\n")
    return caught.value.code().name, text, label


async def versions(server, *labels: str, workers: int = 0) -> None:
    for label in labels:
        await server.registry.create_deployment(NewDeployment(("demo",), "many", label, workers=workers), "test")


class TestRegister:
    async def test_without_workers(self, empty):
        said = await empty.manage("RegisterModel", url="densenet161.mar", model_name="seven")
        assert said == (
            'Model "seven" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
        )
        (wanted,) = empty.registry.wanted
        assert wanted.candidates == ("densenet161.mar", "densenet161", "seven")
        assert (wanted.served_name, wanted.label, wanted.workers) == ("seven", "1.0", 0)

    async def test_synchronously(self, empty):
        said = await empty.manage("RegisterModel", url="demo", initial_workers=2, synchronous=True)
        assert said == 'Model "demo" Version: 1 registered with 2 initial workers'
        assert await empty.predict("demo", data=b"The capital")

    async def test_asynchronously(self, empty):
        said = await empty.manage("RegisterModel", url="demo", initial_workers=1)
        assert said == "Processing worker updates..."

    @pytest.mark.parametrize(("url", "name", "candidates", "served"), [
        (f"{S3}densenet161.mar", "densenet161", ("densenet161",), "densenet161"),
        (f"{S3}nothing.mar", "demo", ("nothing", "demo"), "demo"),
        ("org/tiny", "", ("org/tiny",), "tiny"),
        ("file:///models/demo", "demo", ("/models/demo", "demo"), "demo"),
        ("demo.tar.gz", "", ("demo.tar.gz", "demo"), "demo"),
    ])  # fmt: skip
    async def test_what_a_url_means(self, empty, url, name, candidates, served):
        await empty.manage("RegisterModel", url=url, model_name=name)
        (wanted,) = empty.registry.wanted
        assert (wanted.candidates, wanted.served_name) == (candidates, served)

    async def test_again(self, empty):
        await empty.manage("RegisterModel", url="demo.mar")
        assert await refused(empty.manage("RegisterModel", url="demo.mar")) == (
            "ALREADY_EXISTS", "Model version 1.0 is already registered for model demo", HTTP + "ConflictStatusException")  # fmt: skip
        assert await refused(empty.manage("RegisterModel", url=f"{S3}demo.mar")) == (
            "INTERNAL", "Model file already exists demo.mar", HTTP + "InternalServerException")  # fmt: skip
        await empty.manage("UnregisterModel", model_name="demo")
        await empty.manage("RegisterModel", url=f"{S3}demo.mar")

    @pytest.mark.parametrize(("fields", "code", "text", "label"), [
        ({}, "INVALID_ARGUMENT", "Parameter url is required.", HTTP + "BadRequestException"),
        ({"url": "demo", "runtime": "python4"}, "INVALID_ARGUMENT", "Invalid RuntimeType value: python4",
         HTTP + "BadRequestException"),
        ({"url": "../demo.mar"}, "NOT_FOUND", "Relative path is not allowed in url: ../demo.mar",
         ARCHIVE + "ModelNotFoundException"),
        ({"url": f"{S3}../demo.mar"}, "NOT_FOUND", f"Relative path is not allowed in url: {S3}../demo.mar",
         ARCHIVE + "ModelNotFoundException"),
        ({"url": "s3://x/demo.mar"}, "NOT_FOUND", "Given URL s3://x/demo.mar does not match any allowed URL(s)",
         ARCHIVE + "ModelNotFoundException"),
        ({"url": "nothing.mar"}, "NOT_FOUND", "Model not found at: nothing.mar", ARCHIVE + "ModelNotFoundException"),
        ({"url": f"{S3}nothing.mar"}, "INVALID_ARGUMENT", f"Failed to download archive from: {S3}nothing.mar",
         ARCHIVE + "DownloadArchiveException"),
        ({"url": "demo", "model_name": "a b"}, "INVALID_ARGUMENT", None, HTTP + "BadRequestException"),
        ({"url": "demo", "handler": "\n"}, "INVALID_ARGUMENT", None, HTTP + "BadRequestException"),
        ({"url": "a" * 3000}, "INVALID_ARGUMENT", None, HTTP + "BadRequestException"),
        ({"url": "http://[::1/demo.mar"}, "INVALID_ARGUMENT", "url is no valid URL.", HTTP + "BadRequestException"),
        ({"url": "file:///%2e%2E/demo"}, "NOT_FOUND", "Relative path is not allowed in url: file:///%2e%2E/demo",
         ARCHIVE + "ModelNotFoundException"),
        ({"url": "file:///a%00", "model_name": "demo"}, "INVALID_ARGUMENT", "url must have no encoded control characters.",
         HTTP + "BadRequestException"),
    ])  # fmt: skip
    async def test_refusals(self, empty, fields, code, text, label):
        found = await refused(empty.manage("RegisterModel", **fields))
        assert (found[0], found[2]) == (code, label)
        assert text is None or found[1] == text
        assert not empty.registry.states

    async def test_allowed_urls(self, begin):
        server = await begin(with_demo=False, allowed_urls=[f"{S3}densenet161.mar"])
        await server.manage("RegisterModel", url=f"{S3}densenet161.mar")
        code, text, _ = await refused(server.manage("RegisterModel", url=f"{S3}demo.mar"))
        assert (code, text) == ("NOT_FOUND", f"Given URL {S3}demo.mar does not match any allowed URL(s)")
        for path in ("/demo", "~/demo", "file:///demo", "FILE:///demo"):
            code, text, _ = await refused(server.manage("RegisterModel", url=path))
            assert (code, text) == ("NOT_FOUND", f"Given URL {path} does not match any allowed URL(s)")
        await server.manage("RegisterModel", url="demo.mar")  # a local name is no URL

    async def test_workers_that_do_not_start_unregister_the_model(self, empty):
        empty.registry.broken = "no memory at /secret/path"
        found = await refused(empty.manage("RegisterModel", url="demo.mar", initial_workers=1, synchronous=True))
        text = "Failed to start workers for model demo version: 1.0"
        assert found == ("INTERNAL", text, HTTP + "InternalServerException")
        assert not empty.registry.states

    async def test_workers_that_do_not_start_unregister_the_model_after_its_client_has_left(self, empty, monkeypatch):
        registry, create = empty.registry, empty.registry.create_deployment

        async def create_without_workers(wanted, actor):
            return await create(replace(wanted, workers=0), actor)

        monkeypatch.setattr(registry, "create_deployment", create_without_workers)
        asked = Registration(url="demo.mar", initial_workers=1, synchronous=True)
        call = asyncio.ensure_future(register(empty.state, asked, "tester"))
        await eventually(lambda: registry.states)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert registry.states
        registry.states = [replace(each, state="failed") for each in registry.states]
        await eventually(lambda: not registry.states)

    async def test_the_model_api_can_be_off(self, begin):
        server = await begin(model_api=False)
        for call in (server.manage("RegisterModel", url="demo"), server.manage("UnregisterModel", model_name="demo")):
            assert await refused(call) == ("PERMISSION_DENIED", "Model API disabled", ARCHIVE + "ModelException")
        assert await server.manage("ScaleWorker", model_name="demo")


class TestArchives:
    """Real .mar files in the model store."""

    @staticmethod
    def archive(folder, name, manifest, **files):
        with zipfile.ZipFile(folder / name, "w") as archive:
            if manifest is not None:
                text = manifest if isinstance(manifest, str) else json.dumps(manifest)
                archive.writestr("MAR-INF/MANIFEST.json", text)
            for file, text in files.items():
                archive.writestr(file.replace("_", "."), text)

    async def test_one_that_names_a_model(self, begin, tmp_path):
        manifest = {
            "runtime": "python3",
            "model": {"modelName": "demo", "modelVersion": "2.5", "handler": "vllm_handler"},
        }
        self.archive(tmp_path, "my.mar", manifest)
        server = await begin(with_demo=False, model_store=tmp_path)
        await server.manage("RegisterModel", url="my.mar")
        (wanted,) = server.registry.wanted
        assert wanted.candidates == ("demo", "vllm_handler", "my.mar", "my")
        assert (wanted.served_name, wanted.label, wanted.folders) == ("demo", "2.5", (tmp_path,))
        (described,) = await server.described(model_name="demo")
        assert (described["modelVersion"], described["runtime"]) == ("2.5", "python3")

    @pytest.mark.parametrize(("manifest", "files", "text"), [
        ({"model": {"modelName": "demo", "handler": "handler.py"}}, {"handler_py": "1"}, "brings code"),
        ({"model": {"modelName": "demo", "handler": "x:handle"}}, {"x": "1"}, "brings code"),
        ({"model": {"modelName": "demo", "serializedFile": "a.pt"}}, {}, "brings code or weights (serializedFile)"),
        ({"model": {"modelName": "demo", "modelFile": "a.py"}}, {}, "brings code or weights (modelFile)"),
        ({"model": {"handler": "x"}}, {}, "Model name is not defined."),
        ({"model": 5}, {}, "Missing Model entry"),
        ("{", {}, "no JSON"),
        ("[" * 70000, {}, "more than 65536 bytes"),
        (None, {"a": "1"}, "no zip file"),
        ({"model": {"modelName": "demo"}}, {f"f{i}": "" for i in range(1000)}, "more than 1000 files"),
    ])  # fmt: skip
    async def test_refused_archives(self, begin, tmp_path, manifest, files, text):
        self.archive(tmp_path, "demo.mar", manifest, **files)
        server = await begin(with_demo=False, model_store=tmp_path)
        code, said, _ = await refused(server.manage("RegisterModel", url="demo.mar"))
        assert code == "INVALID_ARGUMENT"
        assert text in said
        assert str(tmp_path) not in said
        assert not server.registry.wanted

    async def test_one_that_is_no_zip_and_one_that_is_long(self, begin, tmp_path):
        (tmp_path / "text.mar").write_text("PK nothing")
        (tmp_path / "long.mar").write_text("")
        os.truncate(tmp_path / "long.mar", (16 << 20) + 1)
        server = await begin(with_demo=False, model_store=tmp_path)
        for name in ("text", "long"):
            assert (await refused(server.manage("RegisterModel", url=f"{name}.mar")))[0] == "INVALID_ARGUMENT"

    async def test_nothing_outside_of_the_store_is_read(self, begin, tmp_path):
        (tmp_path / "store").mkdir()
        self.archive(tmp_path, "out.mar", {"model": {"modelName": "demo"}})
        os.symlink(tmp_path / "out.mar", tmp_path / "store" / "link.mar")
        server = await begin(with_demo=False, model_store=tmp_path / "store")
        for url in ("link.mar", str(tmp_path / "out.mar"), f"file://{tmp_path}/out.mar"):
            code, text, _ = await refused(server.manage("RegisterModel", url=url))
            assert (code, text) == ("NOT_FOUND", f"Model not found at: {url}")

    async def test_a_compression_without_a_limit_is_not_read(self, begin, tmp_path):
        with zipfile.ZipFile(tmp_path / "bomb.mar", "w", zipfile.ZIP_BZIP2) as archive:
            archive.writestr("MAR-INF/MANIFEST.json", b"{" + b" " * (64 << 20))
        server = await begin(with_demo=False, model_store=tmp_path)
        found = await refused(server.manage("RegisterModel", url="bomb.mar"))
        assert found[:2] == ("INVALID_ARGUMENT", "MANIFEST.json has a compression that is not known here.")

    async def test_damaged_archives_are_refused(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "whole.mar", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"modelName": "demo"}, "x": "abc" * 20}))
        whole = (tmp_path / "whole.mar").read_bytes()
        refusals = 0
        for position in range(len(whole)):
            for bits in (0xFF, 0x01):
                damaged = bytearray(whole)
                damaged[position] ^= bits
                (tmp_path / "damaged.mar").write_bytes(damaged)
                try:
                    read_archive(tmp_path / "damaged.mar")
                except TorchServeError as error:
                    refusals += error.status == 400
        assert refusals > len(whole)


class TestScale:
    async def test_asynchronously(self, server):
        assert await server.manage("ScaleWorker", model_name="demo") == "Processing worker updates..."

    async def test_synchronously(self, server):
        said = await server.manage("ScaleWorker", model_name="demo", min_worker=2, synchronous=True)
        assert said == "Workers scaled to 2 for model: demo"
        state = server.registry.states[0]
        assert (state.min_workers, state.max_workers) == (2, 2)
        said = await server.manage(
            "ScaleWorker", model_name="demo", model_version="1.0", min_worker=1, max_worker=3, synchronous=True
        )
        assert said == "Workers scaled to 1 for model: demo, version: 1.0"
        state = server.registry.states[0]
        assert (state.min_workers, state.max_workers) == (1, 3)

    async def test_numbers_that_are_not_positive_are_not_given(self, server):
        await server.manage("ScaleWorker", model_name="demo", min_worker=-1, max_worker=-5, number_gpu=9, timeout=-1)
        assert server.registry.states[0].min_workers == 1

    @pytest.mark.parametrize(("fields", "code", "text"), [
        ({"model_name": "demo", "min_worker": 2, "max_worker": 1}, "INVALID_ARGUMENT", "max_worker cannot be less than min_worker."),
        ({"model_name": "X"}, "NOT_FOUND", "Model not found: X"),
        ({"model_name": "demo", "model_version": "0.0"}, "NOT_FOUND", "Model version: 0.0 does not exist for model: demo"),
    ])  # fmt: skip
    async def test_refusals(self, server, fields, code, text):
        assert (await refused(server.manage("ScaleWorker", **fields)))[:2] == (code, text)

    async def test_workers_that_do_not_start(self, server):
        server.registry.broken = "no memory"
        found = await refused(server.manage("ScaleWorker", model_name="demo", min_worker=2, synchronous=True))
        assert found[:2] == ("INTERNAL", "Failed to start workers for model demo version: 1.0")
        assert server.registry.states  # only a registration is undone


class TestList:
    @staticmethod
    async def of(server, **fields):
        found = json.loads(await server.manage("ListModels", **fields))
        return [model["modelName"] for model in found["models"]], found.get("nextPageToken")

    async def test_pages(self, empty):
        for name in ("c", "a", "b"):
            await empty.registry.create_deployment(NewDeployment(("demo",), name, "1.0"), "test")
        assert await self.of(empty) == (["a", "b", "c"], None)
        assert await self.of(empty, limit=1) == (["a"], "1")
        assert await self.of(empty, limit=1, next_page_token=1) == (["b"], "2")
        assert await self.of(empty, limit=1, next_page_token=2) == (["c"], None)
        assert await self.of(empty, limit=-1, next_page_token=-1) == (["a", "b", "c"], None)
        assert await self.of(empty, next_page_token=7) == ([], None)

    async def test_no_password_of_a_url(self, empty):
        await empty.manage("RegisterModel", url="https://me:hunter2@example.com/demo.mar")
        listed, described = await empty.manage("ListModels"), await empty.manage("DescribeModel", model_name="demo")
        assert json.loads(listed)["models"] == [{"modelName": "demo", "modelUrl": "https://example.com/demo.mar"}]
        assert "hunter2" not in described
        for url in ("https://me:hunter2@example.com/none.mar", "ftp://me:hunter2@example.com/demo.mar"):
            assert "hunter2" not in str(await refused(empty.manage("RegisterModel", url=url)))

    async def test_only_default_versions_with_their_urls(self, empty):
        await versions(empty, "1.0", "2.0")
        await empty.manage("RegisterModel", url=f"{S3}densenet161.mar")
        text = await empty.manage("ListModels")
        assert text.startswith('{\n  "models": [')
        assert json.loads(text)["models"] == [
            {"modelName": "densenet161", "modelUrl": f"{S3}densenet161.mar"}, {"modelName": "many", "modelUrl": "demo"}]  # fmt: skip


class TestDescribe:
    async def test_a_version(self, empty):
        await empty.manage("RegisterModel", url="demo.mar", initial_workers=2, synchronous=True, batch_size=4,
                           max_batch_delay=50, response_timeout=30, startup_timeout=40, handler="h", runtime="LSP")  # fmt: skip
        (found,) = await empty.described(model_name="demo")
        expected = {"modelName": "demo", "modelVersion": "1.0", "modelUrl": "demo.mar", "runtime": "LSP", "minWorkers": 2,
                    "maxWorkers": 2, "batchSize": 4, "maxBatchDelay": 50, "responseTimeout": 30, "startupTimeout": 40,
                    "loadedAtStartup": False}  # fmt: skip
        assert {key: found[key] for key in expected} == expected
        assert [worker["id"] for worker in found["workers"]] == ["9000", "9001"]
        worker = found["workers"][0]
        assert (worker["pid"], worker["status"], worker["gpu"], worker["gpuUsage"]) == (
            os.getpid(),
            "READY",
            False,
            "N/A",
        )
        assert worker["memoryUsage"] > 1 << 20
        assert worker["startTime"] == "2023-11-14T22:13:20.000Z"
        assert found["jobQueueStatus"] == {"remainingCapacity": 256, "pendingRequests": 0}
        assert "customizedMetadata" not in found

    async def test_versions(self, empty):
        await versions(empty, "1.0", "2.0")
        assert [each["modelVersion"] for each in await empty.described(model_name="many")] == ["1.0"]
        assert [each["modelVersion"] for each in await empty.described(model_name="many", model_version="2.0")] == [
            "2.0"
        ]
        both = await empty.described(model_name="many", model_version="all", customized=True)
        assert [each["modelVersion"] for each in both] == ["1.0", "2.0"]

    async def test_customized(self, server):
        (found,) = await server.described(model_name="demo", customized=True)
        assert found["customizedMetadata"]["max_model_len"] == 2048

    async def test_refusals(self, empty):
        await versions(empty, "1.0")
        describe = "DescribeModel"
        assert (await refused(empty.manage(describe, model_name="X")))[:2] == ("NOT_FOUND", "Model not found: X")
        assert (await refused(empty.manage(describe, model_name="X", model_version="all")))[0] == "NOT_FOUND"
        found = await refused(empty.manage(describe, model_name="many", model_version="7"))
        assert found[:2] == ("NOT_FOUND", "Model version: 7 does not exist for model: many")
        assert (await refused(empty.manage(describe, model_name="X", customized=True)))[0] == "INTERNAL"
        assert await refused(empty.manage(describe, model_name="many", customized=True)) == (
            "INTERNAL",
            'Model "many" has no worker to serve describe request. Please use scale workers API to add workers.',
            "InternalServerException.()",
        )


class TestVersions:
    async def test_the_default(self, empty):
        await versions(empty, "1.0", "2.0", workers=1)
        await empty.serving.connected(2)
        said = await empty.manage("SetDefault", model_name="many", model_version="2.0")
        assert said == 'Default version successfully updated for model "many" to "2.0"'
        await empty.predict("many", data=b"The capital")
        await empty.predict("many", "1.0", data=b"The capital")
        assert [len(fakes[0].submits) for fakes in empty.registry.fakes.values()] == [1, 1]
        found = await refused(empty.manage("SetDefault", model_name="many", model_version="7"))
        assert found[:2] == ("NOT_FOUND", "Model version 7 does not exist for model many")
        found = await refused(empty.manage("SetDefault", model_name="many"))
        assert found[:2] == ("NOT_FOUND", "Model version  does not exist for model many")
        found = await refused(empty.manage("SetDefault", model_name="X", model_version="1.0"))
        assert found[:2] == ("NOT_FOUND", "Model not found: X")

    async def test_unregister(self, empty):
        await versions(empty, "1.0", "2.0")
        found = await refused(empty.manage("UnregisterModel", model_name="many"))
        assert found[:2] == ("FAILED_PRECONDITION", "Cannot remove default version for model many")
        said = await empty.manage("UnregisterModel", model_name="many", model_version="2.0")
        assert said == 'Model "many" unregistered'
        found = await refused(empty.manage("UnregisterModel", model_name="many", model_version="2.0"))
        assert found[:2] == ("NOT_FOUND", "Model version: 2.0 does not exist for model: many")
        await empty.manage("UnregisterModel", model_name="many")
        assert (await refused(empty.manage("UnregisterModel", model_name="many")))[:2] == (
            "NOT_FOUND",
            "Model not found: many",
        )
        found = await refused(empty.manage("UnregisterModel"))
        assert found[:2] == ("INVALID_ARGUMENT", "Parameter url is required.")


async def test_unregistering_waits_for_the_workers(server):
    server.registry.leftover = iter([2, 1, 0, 7])
    assert await server.manage("UnregisterModel", model_name="demo") == 'Model "demo" unregistered'
    assert next(server.registry.leftover) == 7


async def test_the_text_of_an_error_fits_into_its_headers(empty):
    code, text, label = await refused(empty.manage("RegisterModel", url="../" + "\U0001d54f" * 2000))
    assert (code, label) == ("NOT_FOUND", ARCHIVE + "ModelNotFoundException")
    assert text.startswith("Relative path is not allowed in url: ../\U0001d54f")


async def test_many_at_once(empty):
    calls = [empty.manage("RegisterModel", url="demo.mar", model_name=f"m{i}") for i in range(20)]
    await asyncio.gather(*calls)
    assert len(empty.registry.states) == 20
