"""Settings in files, and the secrets that `makesecret` makes."""

from __future__ import annotations

import stat

import pytest
from pydantic import ValidationError

from config.make_secret import main
from config.options import Options

SECRETS_KEY = "A" * 43 + "="


def write(path, content):
    path.write_text(content)
    return path


def refusal(**values):
    with pytest.raises(ValidationError) as caught:
        Options(**values)
    return str(caught.value)


def test_it_works(tmp_path):
    options = Options(
        database_url_file=write(tmp_path / "url", "postgresql://a:b@c/d\n"),
        secrets_key_file=write(tmp_path / "secrets", f" {SECRETS_KEY} \n"),
        api_keys_file=write(tmp_path / "keys", "one\ntwo\n"),
        session_key_file=write(tmp_path / "session", "x" * 32),
    )
    assert options.database_url == "postgresql://a:b@c/d"
    assert options.secrets_key.get_secret_value() == SECRETS_KEY
    assert options.own_keys == ["one", "two"]
    assert options.session_key == "x" * 32
    assert options.api_key_required


def test_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAGOMAN_API_KEYS_FILE", str(write(tmp_path / "keys", "one")))
    assert Options().own_keys == ["one"]
    monkeypatch.setenv("DRAGOMAN_API_KEYS_FILE", "")
    assert Options().own_keys == []


@pytest.mark.parametrize("name", ["database_url", "secrets_key", "api_keys"])
def test_refused(tmp_path, name):
    field, setting = f"{name}_file", f"DRAGOMAN_{name.upper()}_FILE"
    file = write(tmp_path / "secret", "verysecret")
    for wrong in (tmp_path / "none", tmp_path, write(tmp_path / "empty", " \n")):
        assert f"{setting}: {wrong}" in refusal(**{field: wrong})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in refusal(**{field: tmp_path / "binary"})
    assert "more than 65536 bytes" in refusal(**{field: write(tmp_path / "long", "x" * 65537)})
    both = refusal(**{field: file, name: ["x"] if name == "api_keys" else "x"})
    assert f"{setting} are both set" in both
    assert "verysecret" not in both
    assert "input_value" not in both


def test_a_key_that_cannot_be_one_is_refused(tmp_path):
    assert "visible ASCII" in refusal(api_keys_file=write(tmp_path / "keys", "schlüssel"))
    short = write(tmp_path / "session", "x" * 31)
    assert "DRAGOMAN_SESSION_KEY_FILE: a key has at least 32 characters" in refusal(session_key_file=short)


def test_secrets_are_made_once(tmp_path, capsys):
    files = [str(tmp_path / "a" / "password"), f"{tmp_path}/url=postgresql://u:{{}}@h/d", str(tmp_path / "other")]
    assert main("dragoman", files) == 0
    password, url = (tmp_path / "a" / "password").read_text(), (tmp_path / "url").read_text()
    assert len(password) == 43
    assert url == f"postgresql://u:{password}@h/d"
    assert (tmp_path / "other").read_text() != password
    assert stat.S_IMODE((tmp_path / "url").stat().st_mode) == 0o640
    assert main("dragoman", files) == 0
    assert (tmp_path / "url").read_text() == url
    printed = capsys.readouterr()
    assert password not in printed.out + printed.err
    assert "is there" in printed.out
    (tmp_path / "a" / "password").unlink()
    assert main("dragoman", files) == 1
    assert "another secret" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other", "url"]


def test_secrets_that_cannot_be_made(tmp_path, capsys):
    write(tmp_path / "file", "x")
    assert main("dragoman", [str(tmp_path / "file" / "password")]) == 1
    assert "cannot be made" in capsys.readouterr().err
    for wrong in ([f"{tmp_path}/url=a{{}}"], [f"{tmp_path}/p", f"{tmp_path}/url=text"], []):
        with pytest.raises(SystemExit):
            main("dragoman", wrong)
