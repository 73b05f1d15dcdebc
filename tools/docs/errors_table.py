"""Write the table of errors and their statuses in docs/troubleshooting.md, from the dialects' own renderers.

python -m tools.docs.errors_table
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from inference import errors
from inference.dialects.djl import errors as djl
from inference.dialects.mindie import errors as mindie
from inference.dialects.tgi import errors as tgi
from inference.dialects.torchserve import errors as torchserve
from inference.dialects.triton import errors as triton
from inference.errors import ServingError
from inference.vendors import openai_errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- Written by `python -m tools.docs.errors_table`. -->\n", "<!-- To here. -->\n"
ERRORS: tuple[ServingError, ...] = (
    errors.MalformedBody(""),
    errors.EncodedBody(""),
    errors.InvalidRequest(""),
    errors.PromptTooLong("", "prompt", 9, 8),
    errors.OutOfVocabulary(""),
    errors.NotServed(""),
    errors.TemplateError(""),
    errors.Unauthorized(""),
    errors.Forbidden(""),
    errors.ForeignHost(),
    errors.ForeignOrigin(),
    errors.ModelNotFound("x"),
    errors.VersionNotFound("x", "1"),
    errors.RouteNotFound(""),
    errors.MethodNotAllowed(["GET"]),
    errors.BodyTooLarge(1),
    errors.Overloaded(""),
    errors.ShuttingDown(""),
    errors.Unavailable(""),
    errors.Starting("x"),
    errors.GenerationFailed(""),
    errors.DeadlineExceeded(""),
    errors.InternalError(""),
)
"""What any route may raise; routes about adapters and models answer their own errors themselves."""
COLUMNS: dict[str, Callable[[ServingError], str]] = {
    "OpenAI, vLLM": lambda error: str(openai_errors.render(error).status),
    "TGI": lambda error: str(tgi.render(error).status),
    "Triton": lambda error: "{}, {}".format(*triton.error_parts(error)[:2]),
    "MindIE": lambda error: str(mindie.render(error).status),
    "DJL Serving": lambda error: str(djl.render_inference(error).status),
    "TorchServe": lambda error: f"{torchserve.translated(error).status}, {torchserve.translated(error).code}",
}
"""The status of an error by dialect; for Triton and TorchServe of HTTP and gRPC."""


def table() -> str:
    """A row for each error."""
    lines = [f"| error | {' | '.join(COLUMNS)} |", "| --- |" + " --- |" * len(COLUMNS)]
    for error in ERRORS:
        cells = [status(error) for status in COLUMNS.values()]
        lines.append(f"| `{type(error).__name__}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table as it should be."""
    place = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    return place.sub(lambda _: BEGIN + table() + END, page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
