"""Frames: what is not ours is dropped and counted, whatever it is; the sockets are for us alone."""

from __future__ import annotations

import asyncio
import random
import stat
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.kit.engine_process import solo
from tests.kit.process import ask, engine, read, tokens
from trine.core.messages import FRAME_BYTES, Abort, Command, encode, from_engine, to_engine
from trine.core.types import Output, Request
from trine.engine import wire

SECRET = b"s" * wire.SECRET_BYTES
MARK = b"touch /tmp/trine-was-here"
# By hand, protocols 0 to 4: what would run a command if anybody loaded it. Nobody can.
PICKLES = [
    b"cos\nsystem\n(S'" + MARK + b"'\ntR.",
    b"cposix\nsystem\n(S'" + MARK + b"'\ntR.",
    b"cnt\nsystem\n(S'" + MARK + b"'\ntR.",
    b"(S'" + MARK + b"'\nios\nsystem\n.",
    b"(cos\nsystem\nS'" + MARK + b"'\no.",
    b"c__builtin__\neval\n(S'open(\"/tmp/trine-was-here\",\"w\")'\ntR.",
    b"cbuiltins\nexec\n(S'1'\ntR.",
    b"csubprocess\ncheck_output\n((lS'touch'\naS'/tmp/trine-was-here'\natR.",
    b"\x80\x02cos\nsystem\nq\x00X\x19\x00\x00\x00" + MARK + b"q\x01\x85q\x02Rq\x03.",
    b"\x80\x03cposix\nsystem\nq\x00X\x19\x00\x00\x00" + MARK + b"q\x01\x85q\x02Rq\x03.",
    b"\x80\x04\x95\x2f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x19" + MARK + b"\x94\x85\x94R\x94.",
    b"\x80\x05\x95\x2f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x19" + MARK + b"\x94\x85\x94R\x94.",
    b"\x80\x04\x8c\x08builtins\x94\x8c\x04eval\x94\x93\x94\x8c\x021+\x94\x85\x94R.",
    b"\x80\x02ccopy_reg\n_reconstructor\n(cos\nsystem\nc__builtin__\nobject\nNtR.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00(tR.",
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(NK\x00tR.",
    b"\x80\x04N.",
    b"\x80\x04]\x94(K\x01K\x02e.",
    b"\x80\x02}q\x00U\x01aK\x01s.",
    b"I1\n.",
]  # fmt: skip
# Well-formed msgpack that is no list of messages, or says the impossible.
MSGPACK = [
    b"", b"\xc0", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\x91" * 5000 + b"\x90", b"\x91\x81\xa4type\xa7Request", b"\x91\x81\xa4type\xa5Other", b"\xc1", b"\x90\x90", b"\xff" * 64,
    encode([{"type": "Request", "id": 1, "tokens": []}]),
    encode([{"type": "Request", "id": "a", "tokens": ["1"]}]),
    encode([{"type": "Output", "id": "a", "tokens": [None]}]),
    encode([{"type": "Request", "id": "a", "tokens": [1.5]}]),
    encode([{"type": "Abort", "ids": {}}]),
    encode([{"type": "Command", "ticket": "x", "name": "stop"}]),
    b"\x91\x83\xa4type\xa7Request\xa2id\xa2\xff\xfe\xa6tokens\x90",
]  # fmt: skip


def frame(body: bytes, counter: int = 0, secret: bytes = SECRET) -> bytes:
    return secret + counter.to_bytes(8, "little") + body


def reader(decode=to_engine) -> wire.Reader:
    return wire.Reader(SECRET, decode)


# ---- the reader alone -------------------------------------------------------------------
@pytest.mark.parametrize("decode", [to_engine, from_engine])
def test_hostile_bytes_are_dropped_with_and_without_the_secret(decode) -> None:
    chance = random.Random(1)
    noise = [chance.randbytes(chance.randrange(200)) for _ in range(1000)]
    for body in (*PICKLES, *MSGPACK, *noise):
        for data in (body, frame(body, 1), frame(body, 1, b"x" * wire.SECRET_BYTES)):
            one = reader(decode)
            messages = one.take(data)
            assert messages == [] and (one.bad == 1 or body == b"\x90"), data[:60]


def test_a_good_frame_with_any_byte_changed_is_dropped_or_is_still_of_our_types() -> None:
    good = next(iter(wire.Writer(SECRET).frames([ask("a"), Abort(["b"]), Command(3, "stats")])))
    assert len(reader().take(good)) == 3
    for place in range(len(good)):
        for flip in (1, 0x80, 0xFF):
            bad = bytearray(good)
            bad[place] ^= flip
            one = reader()
            messages = one.take(bytes(bad))
            assert one.bad == 1 or all(isinstance(m, Request | Abort | Command) for m in messages)
            assert place >= wire.SECRET_BYTES or one.bad == 1
    for length in range(len(good)):
        assert reader().take(good[:length]) == []


def test_repeated_frames_are_dropped_and_lost_ones_are_noticed() -> None:
    writer, one = wire.Writer(SECRET), reader(from_engine)
    frames = [next(iter(writer.frames([Output("a", [i])]))) for i in range(5)]
    got = [one.take(f) for f in (frames[0], frames[0], frames[1], frames[0], frames[4], frames[2])]
    assert [[m.tokens[0] for m in messages] for messages in got] == [[0], [], [1], [], [4], []]
    assert (one.repeated, one.lost, one.bad) == (3, 2, 0)
    assert one.take(writer.loose(Output("a", [9]))) and one.take(writer.loose(Output("a", [9])))


def test_frames_are_split_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES", 200)
    writer, one = wire.Writer(SECRET), reader()
    requests = [Request(f"r{i}", [1] * 20) for i in range(30)]
    frames = list(writer.frames(requests))
    assert len(frames) > 10 and all(len(f) <= 200 for f in frames)
    assert [m for f in frames for m in one.take(f)] == requests and not one.lost
    with pytest.raises(ValueError, match="at most"):
        list(writer.frames([Request("r", [1] * 300)]))


def test_only_the_first_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    one = reader()
    for _ in range(100):
        one.take(b"GET / HTTP/1.1\r\n\r\n")
    assert one.bad == 100 and len(caplog.records) == 1


# ---- the sockets ------------------------------------------------------------------------
def test_sockets_are_private_and_limited(tmp_path: Path) -> None:
    context = zmq.Context()
    try:
        inbox = wire.bind(context, zmq.PULL, tmp_path / "name")
        assert stat.S_IMODE((tmp_path / "name").stat().st_mode) == 0o600
        assert inbox.getsockopt(zmq.MAXMSGSIZE) == FRAME_BYTES
        rogue, friend = context.socket(zmq.PUSH), wire.connect(context, zmq.PUSH, str(tmp_path / "name"))
        rogue.connect(f"ipc://{tmp_path / 'name'}")
        inbox.setsockopt(zmq.RCVTIMEO, 10_000)
        inbox.setsockopt(zmq.MAXMSGSIZE, 1000)
        friend.send(b"small")
        assert inbox.recv() == b"small"
    finally:
        context.destroy(linger=0)


def test_a_frame_above_the_limit_never_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES", 1000)
    context = zmq.Context()
    try:
        inbox = wire.bind(context, zmq.PULL, tmp_path / "name")
        inbox.setsockopt(zmq.RCVTIMEO, 10_000)
        sender = wire.connect(context, zmq.PUSH, str(tmp_path / "name"))
        sender.send(b"x" * 2000)
        other = wire.connect(context, zmq.PUSH, str(tmp_path / "name"))
        other.send(b"fits")
        assert inbox.recv() == b"fits" and not inbox.poll(50)
    finally:
        context.destroy(linger=0)


# ---- a living engine --------------------------------------------------------------------
def test_a_living_engine_shrugs_at_hostile_frames() -> None:
    async def body() -> None:
        async with engine() as client:
            life = client._life
            assert life
            victim = asyncio.create_task(read(client, request := ask("victim", length=100)))
            chance = random.Random(2)
            noise = [chance.randbytes(chance.randrange(300)) for _ in range(300)]
            for body in (*PICKLES, *MSGPACK, *noise):
                await life._requests.send(body)
                await life._requests.send(life._secret + bytes(8) + body)
            extreme = {"type": "Request", "id": "\x00/../x", "tokens": [2**63, -(2**63)], "emitted": -5}
            for body in (encode([extreme]), encode([extreme | {"sampling": {"top_k": 2**62}}])):
                await life._requests.send(life._secret + bytes(8) + body)
            assert tokens(await victim) == solo(request)
            assert client.health.ok and client.health.restarts == 0
            assert client.counts.late_outputs == 2  # the engine's answers to what nobody asked
            after = ask("after")
            assert tokens(await read(client, after)) == solo(after)

    asyncio.run(body())
    assert not Path("/tmp/trine-was-here").exists()


def test_a_client_shrugs_at_hostile_frames_and_replaces_an_engine_whose_frames_are_lost() -> None:
    async def body() -> None:
        async with engine() as client:
            life = client._life
            assert life
            for body in (*PICKLES, *MSGPACK):
                assert life.reader.take(body) == []
            victim = client.submit(request := ask("victim", length=100))
            first = await anext(victim)
            assert client.counts.bad_frames == len(PICKLES) + len(MSGPACK)
            life.reader.lost += 1
            assert first.tokens + tokens([o async for o in victim]) == solo(request)
            assert client.health.restarts == 1 and client.counts.bad_frames == len(PICKLES) + len(MSGPACK)

    asyncio.run(body())


def test_orders_do_not_hold_what_is_not_named() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode([1]), type=wire.Orders)
