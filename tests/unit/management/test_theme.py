"""The templates of the admin's theme that ours replace."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import unfold

from tests.conftest import ROOT

REPLACED = {
    "unfold/helpers/actions_row.html": "a322f5b53d779840b820c8f8707123a0065c30cb7df915d7da6ebad6b4eed104",
}
"""The theme's own that each was made from. After an upgrade that changes one, look at what ours should take over."""


@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_template_is_the_one_that_ours_was_made_from(name):
    theirs = Path(unfold.__file__).parent / "templates" / name
    assert hashlib.sha256(theirs.read_bytes()).hexdigest() == REPLACED[name]


def test_every_replaced_template_is_listed():
    ours = ROOT / "management" / "templates"
    theirs = Path(unfold.__file__).parent / "templates"
    found = {str(path.relative_to(ours)) for path in ours.rglob("*.html") if (theirs / path.relative_to(ours)).exists()}
    assert found == {*REPLACED}
