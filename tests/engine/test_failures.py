import string

import msgspec
import pytest

from engine import failures
from engine.adapters import failures as adapters
from engine.adapters.failures import AdapterCode, AdapterError, AdapterFailure
from engine.failures import Failure, FailureCode, FinishReason, adapter_failure, words
from engine.messages import Outputs, Reply, RequestOutput, Stats, frame, to_client


def facts_of(template: str) -> dict[str, str]:
    return {name: f"<{name}>" for _, name, _, _ in string.Formatter().parse(template) if name}


@pytest.mark.parametrize("code", FailureCode)
def test_every_failure_has_words_and_crosses_the_socket(code):
    facts = facts_of(failures.TEMPLATES[code]) | {"adapter": "in_use"}
    failure = Failure(code, facts)
    output = RequestOutput(1, finish_reason=FinishReason.ERROR, error=failure)
    got = to_client.decode(frame(Outputs([output], Stats()))[4:]).outputs[0]
    assert got.error == failure
    assert got.error.code is code
    assert got.finish_reason is FinishReason.ERROR
    assert words(got.error)
    assert "{" not in words(got.error)


@pytest.mark.parametrize("code", AdapterCode)
def test_every_failure_of_an_adapter_has_words_and_crosses_the_socket(code):
    error = AdapterError(code, **facts_of(adapters.TEMPLATES[code]))
    got = to_client.decode(frame(Reply(1, error.failure))[4:])
    assert got == Reply(1, error.failure)
    assert got.error.words == str(error)
    assert words(adapter_failure(got.error)) == f"adapter: {error}"


def test_a_code_that_nobody_knows_is_no_message():
    body = frame(Reply(1, AdapterFailure(AdapterCode.IN_USE)))[4:].replace(b"in_use", b"in_usf")
    with pytest.raises(msgspec.ValidationError):
        to_client.decode(body)
