"""The flags of `serve`: each one acts or is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from config import command_line
from config.management.commands.serve import Asked, Command, asked, deploy_as_configured
from config.options import Options, get_options
from config.serve_flags import FLAGS, REFUSED, add_flags, apply_flags, engine_options, tokens, unapplied
from engine.config import OPTIONS
from management.models import Deployment
from tests.conftest import DEMO

ADAPTERS = DEMO.parent / "demo-adapters"


def parsed(*arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def settings_of(monkeypatch, *arguments: str) -> Options:
    environment: dict[str, str] = {}
    apply_flags(list(arguments), environment)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    return Options()


@pytest.mark.parametrize(("arguments", "setting", "value"), [
    (["--host", "0.0.0.0"], "host", "0.0.0.0"),
    (["some/model", "--port", "9000"], "front_port", 9000),
    (["--port=9000"], "front_port", 9000),
    (["--api-key", "a", "b"], "own_keys", ["a", "b"]),
    (["--allowed-origins", '["https://a.example"]'], "allowed_origins", ["https://a.example"]),
    (["--allowed-methods", '["get"]'], "allowed_methods", ["GET"]),
    (["--allowed-headers", '["X-Mine"]'], "allowed_headers", ["x-mine"]),
    (["--allow-credentials"], "allow_credentials", True),
    (["--max-model-len", "4k"], "max_model_len", 4000),
    (["--max-model-len", "auto"], "max_model_len", 0),
    (["--dtype", "half"], "dtype", "float16"),
    (["-q", "int8"], "quantization", "int8"),
    (["--max-num-seqs", "8"], "max_num_seqs", 8),
    (["--max-num-batched-tokens", "2K"], "max_num_batched_tokens", 2048),
    (["--kv-cache-memory-bytes", "1048576"], "kv_cache_bytes", 1 << 20),
    (["-tp", "2"], "tensor_parallel_size", 2),
    (["--enable-prompt-tokens-details"], "show_cached_tokens", True),
])  # fmt: skip
def test_flags_that_are_settings(monkeypatch, arguments, setting, value):
    monkeypatch.setenv("DRAGOMAN_FRONT_PORT", "7000")
    assert getattr(settings_of(monkeypatch, *arguments), setting) == value


def test_a_certificate_and_its_key_come_together(monkeypatch):
    settings = settings_of(monkeypatch, "--ssl-certfile", "/tls/server.pem", "--ssl-keyfile", "/tls/server.key")
    assert (settings.tls_certificate, settings.tls_key) == (Path("/tls/server.pem"), Path("/tls/server.key"))
    assert settings.front_url == "https://127.0.0.1:8000"


@pytest.mark.parametrize(("arguments", "options"), [
    (["--block-size", "32"], {"block_size": 32}),
    (["--no-enable-prefix-caching"], {"prefix_caching": False}),
    (["--enable-prefix-caching"], {"prefix_caching": True}),
    (["--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16"],
     {"max_adapters": 2, "max_cached_adapters": 4, "max_adapter_rank": 16}),
    (["--enable-lora", "--enable-auto-tool-choice", "--enable-ssl-refresh", "--port", "1"], {}),
])  # fmt: skip
def test_flags_that_are_engine_options(arguments, options):
    assert engine_options(parsed(*arguments)) == options


def test_every_flag_acts():
    always = {"--enable-lora", "--enable-auto-tool-choice", "--enable-ssl-refresh"}
    own = {"--served-model-name", "--lora-modules"}
    for flag in FLAGS:
        assert bool(flag.setting) + bool(flag.option) + (flag.names[0] in always | own) == 1
        assert not flag.option or flag.option in OPTIONS
        assert not flag.setting or flag.setting in Options.model_fields


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_cannot_act_are_refused(capsys, name):
    with pytest.raises(SystemExit):
        parsed(name, "x")
    assert f"{name} cannot act here: {REFUSED[name]}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["--port", "x"], ["--dtype", "int3"], ["--max-model-len", "1.5"], ["--lora-modules", "a"], ["--lora-modules", "{"],
    ["--lora-modules", "=x"], ["--lora-modules", '{"name": 1, "path": "x"}'], ["--allowed-origins", "*"],
    ["--unheard-of"], ["one", "two"],
])  # fmt: skip
def test_mistakes_are_refused_and_change_no_setting(arguments):
    environment: dict[str, str] = {}
    apply_flags([*arguments, "--host", "::"], environment)
    if arguments[0] not in ("--unheard-of", "one"):
        assert environment == {}
    with pytest.raises(SystemExit):
        parsed(*arguments)


def test_a_value_out_of_range_names_its_flag(monkeypatch, capsys):
    monkeypatch.setenv("DRAGOMAN_FRONT_PORT", "1")  # restored after the test
    get_options.cache_clear()
    try:
        with pytest.raises(SystemExit):
            command_line.main(["manage.py", "serve", "--port", "70000"])
    finally:
        get_options.cache_clear()
    assert "error: --port: " in capsys.readouterr().err


def test_credentials_need_named_origins():
    assert Options(allow_credentials=True, allowed_origins=["https://a.example"]).allow_credentials
    for wrong in ({"allow_credentials": True, "allowed_origins": ["*"]}, {"allowed_methods": ["a b"]},
                  {"allowed_headers": [""]}, {"api_keys": [""]}, {"api_keys": ["a b"]}):  # fmt: skip
        with pytest.raises(ValueError, match="validation error"):
            Options(**wrong)


def test_a_key_of_the_settings_asks_for_keys_unless_told_otherwise():
    assert Options(api_keys=["a"]).api_key_required
    assert not Options(api_keys=["a"], require_api_key=False).api_key_required
    assert not Options().api_key_required


def test_flags_in_groups(capsys):
    with pytest.raises(SystemExit):
        Command().create_parser("manage.py", "serve").parse_args(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n{group}:\n" in shown for group in {flag.group for flag in FLAGS})
    assert "--gpu-memory-utilization" not in shown


def test_settings_that_come_too_late_are_no_flags():
    assert unapplied({"port": 9000}, {}) == "DRAGOMAN_FRONT_PORT"
    assert (
        unapplied({"port": 9000, "api_key": ["a"]}, {"DRAGOMAN_FRONT_PORT": "9000", "DRAGOMAN_API_KEYS": '["a"]'})
        is None
    )
    with pytest.raises(CommandError, match="DRAGOMAN_FRONT_PORT must be in the environment"):
        call_command("serve", "--port", "9000")
    with pytest.raises(CommandError, match="unrecognized"):
        call_command("serve", "--por", "9000")


@pytest.mark.parametrize(("given", "number"), [("17", 17), ("1.5k", 1500), ("1K", 1024), ("1m", 10**6), ("-1", 0)])
def test_numbers_of_tokens(given, number):
    assert tokens(given) == number


@pytest.mark.django_db
def test_the_deployment_that_flags_ask_for():
    adapter = min(p for p in ADAPTERS.glob("*") if p.is_dir())
    second = json.dumps({"name": "two", "path": str(adapter), "base_model_name": "mine"})
    modules = ["--lora-modules", f"one={adapter}", second]
    given = asked(parsed(str(DEMO), "--served-model-name", "mine", "--block-size", "32", *modules))
    row = deploy_as_configured(given, get_options(), [])
    assert (row.name, row.is_default, row.engine_options["block_size"]) == ("mine", True, 32)
    assert row.version.source == str(DEMO.resolve())
    assert {"one", "two"} <= set(row.adapters.values_list("name", flat=True))
    assert [d.name for d in Deployment.objects.all()] == ["mine"]


@pytest.mark.django_db
@pytest.mark.parametrize(("arguments", "text"), [
    (["--served-model-name", "a", "b"], "one name"), (["a", "--model", "b"], "named twice"),
    (["--lora-modules", "a=x", "a=y"], "two adapters"),
])  # fmt: skip
def test_deployments_that_cannot_be(arguments, text):
    with pytest.raises(CommandError, match=text):
        asked(parsed(*arguments))


@pytest.mark.django_db
def test_an_adapter_of_another_model_is_refused():
    given = Asked(str(DEMO), "mine", {}, [("one", "/nowhere", "other")])
    with pytest.raises(CommandError, match="other, which is not served"):
        deploy_as_configured(given, get_options(), [])
