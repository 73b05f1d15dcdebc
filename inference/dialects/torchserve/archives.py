"""What a model archive (.mar) in the model store says about itself. Nothing is unpacked, and no code in it is run.

Only an archive that names a model is of use here: one with code or weights of its own would not be served as it says.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.torchserve.errors import ARCHIVE, bad_request

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "MAR-INF/MANIFEST.json"
MAX_BYTES = 16 << 20
"""The longest archive that is opened: one that names a model is short."""
MAX_FILES = 1000
MAX_MANIFEST_BYTES = 1 << 16
MAX_NAME = 200
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Others are decompressed without a limit, whatever is read of them."""
UNREADABLE = (
    zipfile.BadZipFile, zlib.error, KeyError, OSError, RuntimeError, NotImplementedError, EOFError, ValueError,
)  # fmt: skip
INVALID = f"{ARCHIVE}InvalidModelException"


@dataclass(frozen=True, slots=True)
class Archive:
    """A manifest: the model's name, version and handler, and the runtime, each empty if it has none."""

    name: str
    version: str
    handler: str
    runtime: str


def read_archive(path: Path) -> Archive:
    """Read the manifest of an archive; raises TorchServeError for one that is no archive, or has code or weights."""
    if path.stat().st_size > MAX_BYTES:
        raise bad_request(f"The archive has more than {MAX_BYTES} bytes: it must only name a model.", INVALID)
    try:
        with zipfile.ZipFile(path) as archive:
            if len(archive.infolist()) > MAX_FILES:
                raise bad_request(f"The archive has more than {MAX_FILES} files.", INVALID)
            if archive.getinfo(MANIFEST).compress_type not in COMPRESSIONS:
                raise bad_request("MANIFEST.json has a compression that is not known here.", INVALID)
            with archive.open(MANIFEST) as file:
                text = file.read(MAX_MANIFEST_BYTES + 1)
            names = {each.filename for each in archive.infolist()}
    except UNREADABLE as error:
        raise bad_request("The archive is no zip file with a MAR-INF/MANIFEST.json.", INVALID) from error
    if len(text) > MAX_MANIFEST_BYTES:
        raise bad_request(f"MANIFEST.json has more than {MAX_MANIFEST_BYTES} bytes.", INVALID)
    return _checked(_parsed(text), names)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        manifest = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request("MANIFEST.json is no JSON.", INVALID) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), dict):
        raise bad_request("Missing Model entry in MANIFEST.json", INVALID)
    return manifest


def _checked(manifest: dict[str, Any], names: set[str]) -> Archive:
    model = manifest["model"]
    found = Archive(
        _text(model.get("modelName")),
        _text(model.get("modelVersion")),
        _text(model.get("handler")),
        _text(manifest.get("runtime")),
    )
    if not found.name:
        raise bad_request("Model name is not defined.", INVALID)
    brings = [key for key in ("serializedFile", "modelFile") if model.get(key)]
    file = found.handler.partition(":")[0]
    if file in names or file.endswith((".py", ".so")):
        brings.append("handler")
    if brings:
        text = f"The archive brings code or weights ({', '.join(brings)}), which this server does not load."
        raise bad_request(text, INVALID)
    return found


def _text(value: Any) -> str:
    return value[:MAX_NAME] if isinstance(value, str) else ""
