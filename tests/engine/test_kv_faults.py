"""Transfers that go wrong: whatever a peer sends or does not send, the receiver's text is that of one engine, and both go on."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import msgspec
import pytest

from engine.failures import FailureCode
from engine.kv_transfer import wire
from engine.kv_transfer.arrivals import Arrival
from engine.kv_transfer.handle import Identity, KvSource, TransferCode, new_transfer_id, parse_source
from engine.kv_transfer.messages import Pull
from engine.kv_transfer.wire import Done, End
from engine.messages import PROTOCOL_VERSION, Hello, Submit, frame
from engine.sampling.params import SamplingParams
from tests.engine.engines import CLIENT, prompts
from tests.engine.few_blocks import forget_cached
from tests.engine.pairs import Held, idle, offer, piece, transport
from tests.engine.test_kv_transfer import make
from tests.engine.test_replay import SAMPLED

PROMPT = prompts(1700, (150,), seed=6)[0]


__all__ = ["transport"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, transport):
    folder = tmp_path_factory.mktemp("faults")
    prefill, door = make(folder, "p", kv_transport=transport)
    decode, other = make(folder, "d", kv_transport=transport)
    yield prefill, decode
    for driver, each in ((prefill, door), (decode, other)):
        idle(driver.engine)
        driver.engine.close()
        each.close()


@pytest.fixture
def impatient(monkeypatch):
    """A peer is given up sooner, and pieces are of one block, so that there are many."""
    monkeypatch.setattr(wire, "STALL_S", 0.5)
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    monkeypatch.setattr(wire, "PIECE_BYTES", 1)


class Between:
    """Listens at `path` and hands the first connection to `play`, in a thread."""

    def __init__(self, path, play) -> None:
        self.address = f"unix:{path}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._play = play
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                self._play(connection)
                self._over.wait()

    def close(self) -> None:
        self._over.set()
        self._listener.close()


def held(prefill: Held, **more: object) -> tuple[list[int], KvSource]:
    """The first token of the prompt, and where its blocks are held."""
    tokens, _, end = prefill.alone(PROMPT, hold=new_transfer_id(), **SAMPLED, **more)
    return tokens, end.source


def ends_as_alone(pair, first, source, code: TransferCode | None, **more: object) -> None:
    """The receiver's text is right, and it knows why the blocks did not come."""
    prefill, decode = pair
    failures = decode.engine.transfers.failures
    before = failures.copy()
    tokens, *_ = prefill.alone(PROMPT, **SAMPLED, **more)
    rest, *_ = decode.alone(PROMPT, generated=first, source=source, **SAMPLED, **more)
    assert first + rest == tokens
    assert [*(failures - before)] == ([] if code is None else [code])


def through(source: KvSource, change):
    """Forwards between a receiver and the sender; `change` gets the sender's bytes and the number of those before."""

    def play(receiver: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
            sender.connect(source.address.removeprefix("unix:"))
            sender.sendall(receiver.recv(4096))
            passed = 0
            while data := sender.recv(1 << 16):
                changed = change(data, passed)
                passed += len(data)
                receiver.sendall(changed)
                if len(changed) < len(data):
                    return

    return play


@pytest.mark.parametrize("at", [0, 3, 200, 900, 5_000, 40_000])
@pytest.mark.parametrize("kind", ["cut", "stall", "flip"])
def test_bytes_are_lost_or_changed_on_the_way(pair, transport, impatient, monkeypatch, tmp_path, kind, at):
    if kind == "cut":
        monkeypatch.setattr(wire, "STALL_S", 60.0)
    if transport == "nixl" and at > 200:
        pytest.skip("the blocks take another way than the connection, on which more bytes wait for an answer")
    first, source = held(pair[0], salt=f"{kind} {at}")

    def cut(data: bytes, passed: int) -> bytes:
        if passed <= at < passed + len(data):
            return data[: at - passed]
        return data

    def flip(data: bytes, passed: int) -> bytes:
        if not passed <= at < passed + len(data):
            return data
        changed = bytearray(data)
        changed[at - passed] ^= 0x55
        return bytes(changed)

    def hang_up(receiver: socket.socket) -> None:
        through(source, cut)(receiver)
        receiver.shutdown(socket.SHUT_RDWR)

    between = Between(
        tmp_path / "b", {"cut": hang_up, "stall": through(source, cut), "flip": through(source, flip)}[kind]
    )
    failures = pair[1].engine.transfers.failures
    before = failures.copy()
    faulty = msgspec.structs.replace(source, address=between.address)
    tokens, *_ = pair[0].alone(PROMPT, salt="whole", **SAMPLED)
    rest, *_ = pair[1].alone(PROMPT, generated=first, source=faulty, salt=f"{kind} {at}", **SAMPLED)
    between.close()
    assert first + rest == tokens
    (code,) = failures - before
    monkeypatch.setattr(wire, "STALL_S", 60.0)  # the others' threads may be held up
    if kind == "cut":
        assert code is TransferCode.LOST
    elif kind == "stall":
        assert code is TransferCode.STALLED
    elif at >= 5_000:
        assert code is TransferCode.DAMAGED
    ends_as_alone(pair, first, source, None, salt=f"{kind} {at}")  # a lost receiver may come again
    idle(pair[0].engine)


def answers(frames):
    def play(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(frames)

    return play


def test_frames_that_are_not_of_the_protocol(pair, impatient, tmp_path):
    first, source = held(pair[0], salt="frames")
    hold = pair[0].engine.transfers.holds.find(source.transfer_id)
    size = pair[0].engine.transfers._blocks.block_bytes
    prefill = pair[0].engine
    begin = frame(offer(prefill, hold.identity, size))
    odd = {
        "oversized": struct.pack("<I", 1 << 31),
        "not msgpack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        "another message": frame(Hello(1, "x", 1)),
        "no offer": frame(End()),
        "two offers": begin + begin,
        "too early an end": begin + frame(End()),
        "a gap": begin + frame(piece(prefill, 3, 1)),
        "backwards": begin + frame(piece(prefill, -1, 1)),
        "too many": begin + frame(piece(prefill, 0, 1 << 40)),
        "a negative count": begin + frame(piece(prefill, 0, -1)),
    }
    for name, data in odd.items():
        between = Between(tmp_path / name, answers(data))
        faulty = msgspec.structs.replace(source, address=between.address)
        forget_cached(pair[1].engine.scheduler.pool)
        ends_as_alone(pair, first, faulty, TransferCode.MALFORMED, salt="frames")
        between.close()
    pair[0].engine.transfers.release([source.transfer_id])


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("model", TransferCode.FOREIGN_MODEL),
        ("dtype", TransferCode.FOREIGN_DTYPE),
        ("layout", TransferCode.FOREIGN_LAYOUT),
        ("adapter", TransferCode.FOREIGN_ADAPTER),
        ("salt", TransferCode.FOREIGN_SALT),
        ("tokens", TransferCode.FOREIGN_TOKENS),
    ],
)
@pytest.mark.parametrize("liar", ["sender", "receiver"])
def test_foreign_blocks_are_refused_by_code(pair, impatient, tmp_path, field, code, liar):
    """By the sender, which compares first; and by the receiver, if the sender says that all is well."""
    first, source = held(pair[0], salt="foreign")
    hold = pair[0].engine.transfers.holds.find(source.transfer_id)
    other = msgspec.structs.replace(hold.identity, **{field: "another"})
    forget_cached(pair[1].engine.scheduler.pool)
    if liar == "receiver":
        hold.identity = other
        ends_as_alone(pair, first, source, code, salt="foreign")
    else:
        size = pair[0].engine.transfers._blocks.block_bytes
        between = Between(tmp_path / "b", answers(frame(offer(pair[0].engine, other, size))))
        faulty = msgspec.structs.replace(source, address=between.address)
        ends_as_alone(pair, first, faulty, code, salt="foreign")
        between.close()
    pair[0].engine.transfers.release([source.transfer_id])


def test_blocks_of_another_salt_or_prompt_are_not_given(pair):
    prefill, decode = pair
    first, source = held(prefill, salt="mine")
    for prompt, salt, code in (
        (PROMPT, "yours", TransferCode.FOREIGN_SALT),
        ([*PROMPT[:-1], 5], "mine", TransferCode.FOREIGN_TOKENS),
    ):
        before = decode.engine.transfers.failures[code]
        forget_cached(decode.engine.scheduler.pool)
        decode.alone(prompt, generated=first, source=source, salt=salt, **SAMPLED)
        assert decode.engine.transfers.failures[code] == before + 1
    prefill.engine.transfers.release([source.transfer_id])


def test_nobody_there(pair, tmp_path):
    first, source = held(pair[0], salt="nobody")
    for place in ("unix:" + str(tmp_path / "none"), "carrier-pigeon:loft"):
        forget_cached(pair[1].engine.scheduler.pool)
        faulty = msgspec.structs.replace(source, address=place)
        ends_as_alone(pair, first, faulty, TransferCode.LOST, salt="nobody")
    faulty = msgspec.structs.replace(source, transfer_id=new_transfer_id())
    forget_cached(pair[1].engine.scheduler.pool)
    ends_as_alone(pair, first, faulty, TransferCode.UNKNOWN, salt="nobody")
    pair[0].engine.transfers.release([source.transfer_id])


@pytest.mark.parametrize("says", [b"", b"\xff\xff\xff\xff", frame(Done())[:-1], frame(Hello(1, "x", 1))])
def test_a_receiver_that_vanishes_or_talks_nonsense(pair, transport, impatient, monkeypatch, says):
    """The blocks are still there for the next one."""
    first, source = held(pair[0], salt="vanish")
    hold = pair[0].engine.transfers.holds.find(source.transfer_id)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as receiver:
        receiver.connect(source.address.removeprefix("unix:"))
        pull = Pull(PROTOCOL_VERSION, "p", 1, source.transfer_id, hold.identity, source.num_tokens, 0, transport)
        receiver.sendall(frame(pull))
        receiver.recv(1000)
        receiver.sendall(says)
    forget_cached(pair[1].engine.scheduler.pool)
    monkeypatch.setattr(wire, "STALL_S", 60.0)
    ends_as_alone(pair, first, source, None, salt="vanish")
    idle(pair[0].engine)


def test_an_abort_while_blocks_are_on_their_way(pair, impatient, tmp_path):
    prefill, decode = pair
    first, source = held(prefill, salt="abort")
    between = Between(tmp_path / "b", lambda connection: connection.recv(4096))
    decode.ask(PROMPT, generated=first, source=msgspec.structs.replace(source, address=between.address), salt="abort")
    decode.step()
    decode.engine.abort(1, [0])
    decode.run()
    assert decode.whole()[2].finish_reason == "abort"
    idle(decode.engine)
    between.close()
    prefill.engine.transfers.release([source.transfer_id])
    idle(prefill.engine)


def test_an_abort_of_a_held_request(pair):
    prefill, _ = pair
    prefill.ask(PROMPT, hold=new_transfer_id(), salt="dropped")
    prefill.engine.abort(1, [0])
    prefill.run()
    assert prefill.whole()[2].source is None
    idle(prefill.engine)


def test_too_many_at_once(pair, monkeypatch):
    first, source = held(pair[0], salt="crowd")
    monkeypatch.setattr("engine.kv_transfer.arrivals.MAX_ARRIVALS", 0)
    ends_as_alone(pair, first, source, TransferCode.CROWDED, salt="crowd")
    pair[0].engine.transfers.release([source.transfer_id])


def test_a_transfer_has_one_name(pair):
    prefill, _ = pair
    name = new_transfer_id()
    prefill.alone(PROMPT, hold=name, salt="one")
    refused = prefill.engine.submit(CLIENT, Submit(7, PROMPT, SamplingParams(max_tokens=1), hold=name))
    assert refused.error.code is FailureCode.REQUEST_ID_IN_USE
    prefill.engine.transfers.release([name, "unknown"])
    idle(prefill.engine)


def test_the_text_of_a_source():
    source = KvSource("unix:/run/w", "demo/0", 3, new_transfer_id(), 33, 16)
    assert parse_source(source.text()) == source
    assert source.num_blocks == 3
    for text in ("", "[]", "{}", "null", '["a","b",1,"c",-1,16]', '["a","b",1,"c",1,0]', "[" * 2000, "\ud800"):
        with pytest.raises(ValueError, match="source"):
            parse_source(text)


def test_an_identity_holds_no_content(pair):
    """It may be logged: what it is of cannot be read from it."""
    _, source = held(pair[0], salt="secret salt")
    identity: Identity = pair[0].engine.transfers.holds.find(source.transfer_id).identity
    assert "secret" not in repr(identity)
    assert len(identity.tokens) == len(identity.salt) == 64
    pair[0].engine.transfers.release([source.transfer_id])


def test_patience_is_longer_than_a_beat():
    assert wire.STALL_S > 5 * wire.BEAT_S


def test_a_piece_that_comes_after_an_abort_is_not_kept():
    """The thread was receiving it; kept, it would count as staged for ever."""
    arrival = Arrival(None, None, None, lambda *_: None)
    arrival.cancel()
    arrival.take(0, 1, bytes(10))
    arrival.settle(None)
    assert arrival.staged_bytes == 0
