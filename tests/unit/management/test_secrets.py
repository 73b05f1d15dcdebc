"""Secrets are stored encrypted, and shown to nobody."""

from __future__ import annotations

import stat

import pytest
from cryptography.fernet import Fernet

from management.generated import generated
from management.models import Secret
from management.services.deployments import start_deployment
from management.services.errors import RegistryError
from management.services.secrets import HUB_TOKEN, count_unreadable, read_secret, store_secret

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def key(settings, tmp_path):
    settings.SECRETS_KEY, settings.SECRETS_KEY_FILE = "", tmp_path / "secrets-key"
    return settings


def test_it_works(deployment):
    assert read_secret(deployment, HUB_TOKEN) is None
    store_secret(deployment, HUB_TOKEN, "hf_abc")
    assert read_secret(deployment, HUB_TOKEN) == "hf_abc"
    assert b"hf_abc" not in bytes(Secret.objects.get().ciphertext)
    store_secret(deployment, HUB_TOKEN, "hf_def")
    assert read_secret(deployment, HUB_TOKEN) == "hf_def"
    store_secret(deployment, HUB_TOKEN, "")
    assert not Secret.objects.exists()


def test_the_generated_key_is_the_owners_and_stays(tmp_path):
    path = tmp_path / "key"
    texts = iter(("first", "second"))
    assert generated(path, lambda: next(texts)) == generated(path, lambda: next(texts)) == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["key"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_key_reads_what_an_old_one_wrote(deployment, key):
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    key.SECRETS_KEY = old
    store_secret(deployment, HUB_TOKEN, "hf_abc")
    key.SECRETS_KEY = f"{new},{old}"
    assert read_secret(deployment, HUB_TOKEN) == "hf_abc"
    key.SECRETS_KEY = new
    with pytest.raises(RegistryError, match="DRAGOMAN_SECRETS_KEY has changed"):
        read_secret(deployment, HUB_TOKEN)


def test_what_another_key_wrote_is_counted(deployment, key):
    assert count_unreadable() == (0, 0)
    assert not key.SECRETS_KEY_FILE.exists()
    store_secret(deployment, HUB_TOKEN, "hf_abc")
    assert count_unreadable() == (0, 1)
    key.SECRETS_KEY_FILE.unlink()  # as on a host that has no key yet
    assert count_unreadable() == (1, 1)
    key.SECRETS_KEY = Fernet.generate_key().decode()
    assert count_unreadable() == (1, 1)


def test_a_host_with_another_key_does_not_fail_the_deployment(deployment, key, reconciler, launcher, clock):
    old, key.SECRETS_KEY = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    store_secret(deployment, HUB_TOKEN, "hf_abc")
    start_deployment(deployment, "tester")
    mine, key.SECRETS_KEY = key.SECRETS_KEY, old
    reconciler.reconcile_once()
    deployment.refresh_from_db()
    assert not launcher.workers
    assert "DRAGOMAN_SECRETS_KEY has changed" in deployment.reason
    key.SECRETS_KEY = mine
    clock.now += 60
    reconciler.reconcile_once()
    assert launcher.secrets == {"HF_TOKEN": "hf_abc"}


def test_a_bad_key_is_named(deployment, key):
    key.SECRETS_KEY = "short"
    with pytest.raises(RegistryError, match="DRAGOMAN_SECRETS_KEY: must be 32 bytes"):
        store_secret(deployment, HUB_TOKEN, "hf_abc")
