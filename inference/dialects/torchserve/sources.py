"""What the URL of a registration means here: names of models to look for. Nothing is downloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from inference.dialects.torchserve.archives import read_archive
from inference.dialects.torchserve.errors import ARCHIVE, TorchServeError, bad_request, not_found

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference.dialects.torchserve.archives import Archive

SUFFIXES = (".mar", ".tar.gz", ".tgz", ".zip")
FIRST_VERSION = "1.0"
MAX_URL = 2048
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.\-]*://")
_USER = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.\-]*://)[^/?#]*@")
_NAME = re.compile(r"[A-Za-z0-9._\-]{1,128}")


@dataclass(frozen=True, slots=True)
class Source:
    """Where to look for a model.

    `candidates`: for `NewDeployment`. `name`: the model's name unless the client gives one. `label`: its version; empty
    if the found model decides. `remote`: the URL leads elsewhere. `archive`: of the model store.
    """

    url: str
    candidates: tuple[str, ...]
    name: str
    label: str
    remote: bool
    archive: Archive | None = None

    @property
    def file(self) -> str:
        """The last part of the URL."""
        return _last(self.url)

    def missing(self) -> TorchServeError:
        """The error that nothing was found."""
        if self.remote:
            text = f"Failed to download archive from: {without_user(self.url)}"
            return bad_request(text, f"{ARCHIVE}DownloadArchiveException")
        return not_found(f"Model not found at: {without_user(self.url)}")


def without_user(url: str) -> str:
    """The URL as it is told to others: without the user and the password that it may have."""
    return _USER.sub(r"\1", url)


def check_url(url: str, allowed: Sequence[str]) -> None:
    """Check a URL by TorchServe's rules, an absolute path as the URL of a file; raises TorchServeError."""
    if len(url) > MAX_URL or not url.isprintable():
        raise bad_request(f"url must have at most {MAX_URL} printable characters.")
    try:
        path = unquote(urlsplit(url).path)
    except ValueError as error:  # such as a host of half an IPv6 address
        raise bad_request("url is no valid URL.") from error
    if not path.isprintable():
        raise bad_request("url must have no encoded control characters.")
    if ".." in url or ".." in path:
        raise not_found(f"Relative path is not allowed in url: {without_user(url)}")
    meant = f"file://{url}" if url.startswith(("/", "~")) else url  # a path is no way around the patterns
    allows = any(re.fullmatch(pattern, meant, re.IGNORECASE) for pattern in allowed)
    if _SCHEME.match(meant) and not allows:
        raise not_found(f"Given URL {without_user(url)} does not match any allowed URL(s)")


def find_source(url: str, model_name: str, store: Path | None) -> Source:
    """What a checked URL may mean, in order: the name or path itself, the last part's stem, the model's name. Reads the
    manifest of an archive in the store. Raises TorchServeError, also for a name that is none.
    """
    remote = url.lower().startswith(("http://", "https://"))
    path = unquote(urlsplit(url).path) if url.lower().startswith("file://") else url
    stem = _stem(_last(path))
    archived = remote or stem != _last(path)
    archive = None if remote or store is None else _archive_at(path, store)
    named = [] if archive is None else [archive.name, archive.handler]
    tried = [*named, *([] if remote else [path]), *([stem] if archived else []), model_name]
    name = model_name or (archive.name if archive else stem)
    if not _NAME.fullmatch(name):
        raise bad_request("model_name must have 1 to 128 letters, digits, dots, underscores and hyphens.")
    label = "" if not archived else archive.version if archive and archive.version else FIRST_VERSION
    return Source(url, tuple(dict.fromkeys(filter(None, tried))), name, label, remote, archive)


def _archive_at(path: str, store: Path) -> Archive | None:
    """The archive of the store at this path, or None; symbolic links may not lead out of the store."""
    try:
        root = store.resolve()
        found = (root / path).resolve()
        if not found.is_relative_to(root) or not found.is_file():
            return None
    except (OSError, ValueError, RuntimeError):  # the path is none
        return None
    return read_archive(found)


def _last(url: str) -> str:
    path = urlsplit(url).path if _SCHEME.match(url) else url
    return path.rstrip("/").rpartition("/")[2]


def _stem(name: str) -> str:
    suffix = next((each for each in SUFFIXES if name.lower().endswith(each)), "")
    return name[: len(name) - len(suffix)] if suffix else name
