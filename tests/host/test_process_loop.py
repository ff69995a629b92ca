"""The engine's side of the sockets, turned by hand: what it tells, and that it keeps nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.kit.engine_process import Engine, Trouble, solo
from tests.kit.process import ask
from trine.config import Config
from trine.core.messages import Abort, Answer, Beat, Command, from_engine
from trine.core.stats import StepStats
from trine.core.types import Output, Request
from trine.engine import wire
from trine.engine.loop import Link, Loop, Pulse


class Face:
    """The other end, and the loop between."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.requests = wire.bind(self.context, zmq.PUSH, folder / "in")
        self.outputs = wire.bind(self.context, zmq.PULL, folder / "out")
        self.secret = os.urandom(wire.SECRET_BYTES)
        orders = wire.Orders(
            config=Config(), path="", parent=os.getppid(), folder=str(folder),
            requests=str(folder / "in"), outputs=str(folder / "out"), secret=self.secret,
        )  # fmt: skip
        self.writer, self.reader = wire.Writer(self.secret), wire.Reader(self.secret, from_engine)
        self.link = Link(orders)
        self.engine = Engine(0.0)
        self.loop = Loop(self.engine, self.link)  # type: ignore[arg-type]
        self.heard: list[Any] = []

    def send(self, *messages: Any) -> None:
        for frame in self.writer.frames(list(messages)):
            self.requests.send(frame)
        assert self.link.inbox.poll(10_000)

    def turn_until(self, wanted: int, kind: type) -> list[Any]:
        """Turns until so many messages of a kind have come."""
        while len(found := [m for m in self.heard if isinstance(m, kind)]) < wanted:
            self.loop.turn()
            while self.outputs.poll(1):
                self.heard += self.reader.take(self.outputs.recv())
        return found

    def close(self) -> None:
        self.engine.executor.close()
        self.link.close()
        self.context.destroy(linger=0)


@pytest.fixture
def face(tmp_path: Path) -> Iterator[Face]:
    made = Face(tmp_path)
    yield made
    made.close()


def ends(outputs: list[Output]) -> dict[str, str]:
    return {o.id: o.finished for o in outputs if o.finished}


def test_a_request_from_frame_to_frames(face: Face) -> None:
    face.send(request := ask("a", length=5))
    outputs = face.turn_until(5, Output)
    assert [t for o in outputs for t in o.tokens] == solo(request) and ends(outputs) == {"a": "length"}
    assert outputs[0].usage and outputs[0].usage.cached == 1  # told at once
    assert all(o.usage is None for o in outputs[1:-1]) and outputs[-1].usage
    stats = face.turn_until(1, StepStats)
    assert stats[-1].prompt_tokens == 3
    assert face.link.pulse.step == 5 and not face.link.pulse.busy


def test_nothing_is_kept_of_what_has_ended(face: Face) -> None:
    requests = [ask(f"r{i}", length=3) for i in range(20)]
    face.send(*requests, Request("bad", []), Abort(["r3", "r4", "stranger"]), Abort([]))
    outputs: list[Output] = []
    while len(ends(outputs)) < 21:
        outputs = face.turn_until(len(outputs) + 1, Output)
    found = ends(outputs)
    assert (found.pop("bad"), found.pop("r3"), found.pop("r4")) == ("error", "abort", "abort")
    assert set(found.values()) == {"length"}
    assert not face.loop._fresh and not face.loop._refused and not face.engine.live


def test_commands_are_answered_in_order_with_what_came_before(face: Face) -> None:
    face.send(ask("a", length=1000), Command(7, "stats"), Command(8, "explode"), Command(9, "stop"))
    answers = face.turn_until(3, Answer)
    assert [a.ticket for a in answers] == [7, 8, 9] and answers[0].value["running"] == 1
    assert answers[1].error and not answers[2].error and face.loop.stopped


def test_a_step_that_raises_leaves_the_loop(face: Face) -> None:
    face.send(ask("a", prompt=[Trouble.RAISE], length=50))
    with pytest.raises(FloatingPointError):
        face.turn_until(50, Output)


def test_the_heart_beats_by_itself(face: Face) -> None:
    beats = []
    while len(beats) < 3:  # without a single turn
        beats += [m for m in face.reader.take(face.outputs.recv()) if isinstance(m, Beat)]
    assert all(beat == Beat(0, False, 0.0) for beat in beats)


def test_a_pulse_without_turns_is_taken_for_work() -> None:
    pulse = Pulse(step=4)
    assert not pulse.beat().busy
    pulse.turned = -1e9  # long ago
    assert pulse.beat().busy and pulse.beat().idle > 0 and pulse.beat().step == 4
