"""The sandbox child: reads a call, runs its task inside the budget, answers, and waits.

Started as a script by the pool, with the parent's process id and the tasks to import at once.
It ends when its input does, that is when the parent is gone. A blown CPU budget ends it in the
middle (see `limit`); the parent reads that from its exit status.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

LEAN = 32 * 1024 * 1024  # bytes of growth after which a child is better replaced
INPUT = 64 * 1024 * 1024  # bytes of one call


def main() -> None:
    """Serve calls until the parent is gone."""
    if (root := str(Path(__file__).resolve().parents[2])) not in sys.path:
        sys.path.insert(0, root)  # `trine` itself, when it is not installed
    from trine.sandbox import frame, limit, task

    limit.settle(int(sys.argv[1]))
    for name in sys.argv[2:]:
        task.TASKS[name].load()
    base = limit.address_space()
    write(frame.pack(frame.Reply(value="ready"), INPUT))
    while (body := read(frame.length, INPUT)) is not None:
        reply, size = serve(body)
        reply.last = reply.last or limit.address_space() > base + LEAN
        write(answer(reply, size))
        if reply.last:
            return


def serve(body: bytes) -> tuple[Any, int]:
    """Run one call inside its budget; the reply and how long it may be."""
    import msgspec

    from trine.sandbox import limit
    from trine.sandbox.frame import Call, Reply
    from trine.sandbox.task import TASKS

    call = msgspec.msgpack.decode(body, type=Call)
    task = TASKS[call.task]
    function = task.load()
    try:
        limit.arm(call.cpu, call.memory, task.files)
        return Reply(value=msgspec.Raw(msgspec.msgpack.encode(function(call.payload)))), call.answer
    except MemoryError:
        return Reply(kind="memory", last=True), call.answer
    except Exception as error:
        # a plain str, whatever kind of str the exception was made of
        return Reply(kind=type(error).__name__, message=str.__str__(str(error))[:2000]), call.answer
    finally:
        limit.disarm()


def answer(reply: Any, size: int) -> bytes:
    """The frame of a reply, or of the error that it is too long."""
    from trine.sandbox.frame import Reply, TooLong, pack

    try:
        return pack(reply, size)
    except TooLong as error:
        return pack(Reply(kind="answer", message=str(error), last=reply.last), INPUT)


def read(length: Any, limit: int) -> bytes | None:
    """One frame's body; None when the input has ended."""
    stream = sys.stdin.buffer
    if len(head := stream.read(4)) < 4:
        return None
    size = length(head, limit)
    return body if len(body := stream.read(size)) == size else None


def write(data: bytes) -> None:
    """All of `data` to the parent."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
