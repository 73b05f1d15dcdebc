"""MindIE's config.json: its ranges, and the refusals that name the key."""

from __future__ import annotations

import pytest

from inference.dialects.mindie.config_file import MindieConfigError, read_config, wire_settings
from inference.dialects.mindie.dialect import configure
from inference.dialects.mindie.environment import MindieEnvironment
from inference.dialects.mindie.listeners import inter_comm, plane_addresses
from tests.dialects.mindie.config_file import write


def test_the_shipped_form_is_read(tmp_path):
    config = read_config(write(tmp_path))
    settings = wire_settings(config, MindieEnvironment(), "127.0.0.1:1026")
    assert (settings.max_iter_times, settings.max_batch_size, settings.max_input_token_len) == (64, 16, 400)
    assert (settings.max_n, settings.max_loras, settings.truncation) == (16, 0, 0)
    assert config.engine_options == {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 400,
        "block_size": 128,
    }


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("MIES_SERVICE_MONITOR_MODE", "1")
    monkeypatch.setenv("MINDIE_LLM_BENCHMARK_ENABLE", "2")
    monkeypatch.setenv("DYNAMIC_AVERAGE_WINDOW_SIZE", "10")
    settings = wire_settings(None, MindieEnvironment(), "x")
    assert (settings.metrics_enabled, settings.benchmark_enabled, settings.average_window) == (True, True, 10)


BAD = [
    ({"server": {"port": 1023}}, "ServerConfig.port"),
    ({"server": {"port": 65536}}, "ServerConfig.port"),
    ({"server": {"port": None}}, "ServerConfig.port"),
    ({"server": {"port": "1025"}}, "ServerConfig.port"),
    ({"server": {"ipAddress": "host"}}, "ServerConfig.ipAddress"),
    ({"server": {"ipAddress": "0.0.0.0"}}, "allowAllZeroIpListening"),
    ({"server": {"maxLinkNum": 0}}, "ServerConfig.maxLinkNum"),
    ({"server": {"maxLinkNum": 4097}}, "ServerConfig.maxLinkNum"),
    ({"server": {"tokenTimeout": 3601}}, "ServerConfig.tokenTimeout"),
    ({"server": {"e2eTimeout": 0}}, "ServerConfig.e2eTimeout"),
    ({"server": {"maxRequestLength": 101}}, "ServerConfig.maxRequestLength"),
    ({"server": {"maxJsonDepth": 9}}, "ServerConfig.maxJsonDepth"),
    ({"server": {"inferMode": "other"}}, "inferMode"),
    ({"server": {"interCommPort": 1023}}, "ServerConfig.interCommPort"),
    ({"server": {"interCommTlsCaFiles": []}}, "interCommTlsCaFiles"),
    ({"server": {"tlsCaFile": []}}, "tlsCaFile"),
    ({"backend": {"backendName": "x"}}, "BackendConfig.backendName"),
    ({"backend": {"npuDeviceIds": [[0, 1]]}}, "worldSize"),
    ({"deploy": {"maxSeqLen": 0}}, "maxSeqLen"),
    ({"deploy": {"maxInputTokenLen": 401}}, "maxPrefillTokens"),
    ({"deploy": {"truncation": 2}}, "truncation"),
    ({"deploy": {"ModelConfig": []}}, "ModelConfig"),
    ({"model": {"modelName": "-x"}}, "modelName"),
    ({"model": {"trustRemoteCode": True}}, "trustRemoteCode"),
    ({"schedule": {"maxIterTimes": 513}}, "maxIterTimes"),
    ({"schedule": {"maxPrefillBatchSize": 17}}, "maxPrefillBatchSize"),
    ({"schedule": {"cacheBlockSize": 100}}, "cacheBlockSize"),
    ({"schedule": {"maxN": 17}}, "maxN"),
    ({"schedule": {"prefillPolicyType": 1}}, "prefillPolicyType"),
    ({"schedule": {"maxQueueDelayMicroseconds": 499}}, "maxQueueDelayMicroseconds"),
]


@pytest.mark.parametrize(("changes", "named"), BAD)
def test_out_of_range(tmp_path, changes, named):
    with pytest.raises(MindieConfigError, match=named):
        read_config(write(tmp_path, **changes))


def test_addresses_from_the_environment(tmp_path, monkeypatch):
    config = read_config(write(tmp_path))
    monkeypatch.setenv("MIES_CONTAINER_IP", "127.0.0.5")
    assert plane_addresses(MindieEnvironment(), config, "127.0.0.1")["service"] == ("127.0.0.5", 1025)
    assert plane_addresses(MindieEnvironment(), None, "127.0.0.1")["metrics"][0] == "127.0.0.5"
    for address in ("0.0.0.0", "::", "host"):
        monkeypatch.setenv("MIES_CONTAINER_MANAGEMENT_IP", address)
        with pytest.raises(MindieConfigError, match="MIES_CONTAINER_MANAGEMENT_IP"):
            plane_addresses(MindieEnvironment(), config, "127.0.0.1")


def test_instances_speak_in_plain_text_on_loopback_only(tmp_path, monkeypatch):
    config = read_config(write(tmp_path, server={"inferMode": "dmi", "interCommTLSEnabled": False}))
    assert inter_comm(MindieEnvironment(), config, "127.0.0.1") == ("127.0.0.1", 1121)
    with pytest.raises(MindieConfigError, match="interCommTLSEnabled"):
        inter_comm(MindieEnvironment(), config, "10.0.0.1")
    encrypted = read_config(write(tmp_path, server={"inferMode": "dmi"}))
    assert inter_comm(MindieEnvironment(), encrypted, "10.0.0.1") == ("10.0.0.1", 1121)
    assert inter_comm(MindieEnvironment(), None, "10.0.0.1") is None
    monkeypatch.setenv("DRAGOMAN_MINDIE_INFER_MODE", "dmi")
    with pytest.raises(MindieConfigError, match="MINDIE_INFER_MODE"):
        inter_comm(MindieEnvironment(), None, "10.0.0.1")


def test_an_instance_with_a_role_has_a_further_port_with_its_own_files(tmp_path):
    from config.options import Options

    path = write(tmp_path, server={"inferMode": "dmi", "interCommPort": 1234})
    setup = configure(MindieEnvironment(mindie_config=path), Options())
    assert ("127.0.0.1", 1234) in setup.addresses.values()
    (files,) = setup.tls
    assert files.certificate == tmp_path / "security/grpc/certs/server.pem"
    assert files.key == tmp_path / "security/grpc/keys/server.key.pem"
    assert files.authorities == (tmp_path / "security/grpc/ca/ca.pem",)
    standard = configure(MindieEnvironment(mindie_config=write(tmp_path)), Options())
    assert ("127.0.0.1", 1234) not in standard.addresses.values()
    assert standard.tls == []


def test_adapters_lie_anywhere_only_where_every_plane_is_on_loopback(tmp_path):
    from config.options import Options

    assert Options().allowed_adapter_roots(["127.0.0.1", "::1"]) is None
    assert Options().allowed_adapter_roots(["127.0.0.1", "10.0.0.1"]) == []
    assert Options(adapter_roots=[tmp_path]).allowed_adapter_roots(["10.0.0.1"]) == [tmp_path]


def test_no_file_and_no_json(tmp_path):
    for content in (None, "", "{", "[]"):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(MindieConfigError):
            read_config(path)


def test_only_the_last_part_of_the_weights_path_is_told(tmp_path):
    for path in ("/data/models/llama2-7b", "/data/models/llama2-7b/"):
        config = read_config(write(tmp_path, model={"modelWeightPath": path}))
        settings = wire_settings(config, MindieEnvironment(), "127.0.0.1:1026")
        assert settings.model_weights == ("llama_65b", "llama2-7b")
