"""Forms as bodies: what their fields are, and forms that cannot be."""

from __future__ import annotations

import pytest

from inference.errors import MalformedBody
from inference.http.forms import form_fields

URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"


def part(name, value, more=""):
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


@pytest.mark.parametrize(
    ("kind", "body", "fields"),
    [
        (URLENCODED, b"a=1+2&b=&a=%ff%C3%A9", [("a", b"1 2"), ("b", b""), ("a", b"\xff\xc3\xa9")]),
        (f"{URLENCODED}; charset=utf-8", b"%C3%A9=1", [("é", b"1")]),
        (URLENCODED, b"", []),
        (MULTIPART, part("a", b"1") + part("b", b"\xff\r\n", '; filename="f"') + b"--x--\r\n",
         [("a", b"1"), ("b", b"\xff\r\n")]),
    ],
)  # fmt: skip
def test_fields(kind, body, fields):
    assert form_fields(kind, body, 3) == fields


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (URLENCODED, b"a=1&b=2&c=3&d=4", "at most 3 fields"),
        (MULTIPART, b"".join(part(f"f{i}", b"") for i in range(4)) + b"--x--\r\n", "at most 3 fields"),
        (MULTIPART, part("a", b"1"), "end is missing"),
        (MULTIPART, part("", b"1") + b"--x--\r\n", "needs a name"),
        (MULTIPART, b"nothing", "not valid"),
        ("multipart/form-data", b"", "end is missing"),
    ],
)
def test_forms_that_cannot_be(kind, body, words):
    with pytest.raises(MalformedBody, match=words):
        form_fields(kind, body, 3)
