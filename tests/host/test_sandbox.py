"""The sandbox: budgets end what is too much, a fresh child follows, and no child outlives its parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trine.sandbox import Exceeded, Failed, Sandbox
from trine.sandbox.frame import Call, Reply, TooLong, length, pack

ROOT = Path(__file__).resolve().parents[2]
GOOD = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
SPIN = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def ask(source: str, limit: int = 100_000) -> dict[str, Any]:
    return {
        "source": source,
        "messages": [{"role": "user", "content": "hello"}],
        "words": {},
        "arguments": {},
        "limit": limit,
    }


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(size=1, preload=("template.render",)) as sandbox:
        yield sandbox


def works(sandbox: Sandbox) -> bool:
    return sandbox.call("template.render", ask(GOOD))["text"] == "<|user|>hello"


def test_a_task_answers_and_the_child_stays(sandbox: Sandbox) -> None:
    assert works(sandbox)
    pids = sandbox.pids
    assert works(sandbox)
    assert sandbox.pids == pids and len(pids) == 1


BOMBS = {
    "nested loops": (SPIN, "cpu"),
    "a long string": ("{{ ('a' * 10**9) * 8 }}", "memory"),
    "a tower of powers": ("{{ 9**(9**9) }}", "cpu"),
    "a wide number": ("{{ '%0999999999d' % 1 }}", "memory"),
    "a wide field": ("{{ '{:999999999}'.format(1) }}", "memory"),
    "a string that doubles": (
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "memory",
    ),
    "a list that doubles": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "memory",
    ),
    "a product of two lists": ("{{ (range(99999) | list * 99999) | length }}", "memory"),
    "much output": ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "TooMuch"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "Broken"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_and_the_next_call_is_served(sandbox: Sandbox, name: str) -> None:
    source, what = BOMBS[name]
    with pytest.raises((Exceeded, Failed)) as error:
        sandbox.call("template.render", ask(source))
    assert getattr(error.value, "what", None) == what or getattr(error.value, "kind", None) == what
    assert works(sandbox)


def test_a_blown_budget_replaces_the_child(sandbox: Sandbox) -> None:
    assert works(sandbox)
    before = sandbox.pids
    with pytest.raises(Exceeded) as error:
        sandbox.call("template.render", ask(SPIN), cpu=0.02)
    assert "0.02 s of CPU time" in str(error.value)
    assert works(sandbox)
    assert sandbox.pids != before


def test_the_clock_ends_a_call_whose_cpu_budget_would_not(sandbox: Sandbox) -> None:
    with pytest.raises(Exceeded) as error:
        sandbox.call("template.render", ask(SPIN), cpu=60.0, wall=0.1)
    assert error.value.what == "wall"
    assert works(sandbox)


def test_an_answer_over_its_limit_is_refused_and_the_child_stays(sandbox: Sandbox) -> None:
    assert works(sandbox)
    before = sandbox.pids
    with pytest.raises(Exceeded) as error:
        sandbox.call("template.render", ask("{{ 'x' * 50000 }}"), answer=10_000)
    assert error.value.what == "answer"
    assert works(sandbox) and sandbox.pids == before


def test_a_task_that_raises_says_what_and_the_child_stays(sandbox: Sandbox) -> None:
    assert works(sandbox)
    before = sandbox.pids
    with pytest.raises(Failed) as error:
        sandbox.call("template.render", ask("{{ raise_exception('roles must alternate') }}"))
    assert (error.value.kind, str(error.value)) == ("Refused", "roles must alternate")
    assert sandbox.pids == before


def test_only_tasks_of_the_table_have_a_name(sandbox: Sandbox) -> None:
    with pytest.raises(Failed):
        sandbox.call("os.system", "true")
    assert works(sandbox)


def test_a_child_killed_between_calls_is_replaced_unseen(sandbox: Sandbox) -> None:
    assert works(sandbox)
    [pid] = sandbox.pids
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert ended(handle)
    assert works(sandbox)
    assert sandbox.pids != [pid]


def test_a_template_opens_no_file_and_starts_no_process(sandbox: Sandbox) -> None:
    limits = Path(f"/proc/{sandbox.pids[0]}/limits").read_text() if works(sandbox) else ""
    hard = {line[:26].strip(): line.split()[-2:] for line in limits.splitlines()[1:]}
    assert hard["Max core file size"][0] == "0"
    assert hard["Max file size"][0] == "0"
    assert hard["Max processes"][0] == "0"
    handles = os.listdir(f"/proc/{sandbox.pids[0]}/fd")
    assert sorted(handles) == ["0", "1", "2"]
    assert os.readlink(f"/proc/{sandbox.pids[0]}/cwd") == "/"
    assert Path(f"/proc/{sandbox.pids[0]}/environ").read_bytes() == b""


def test_calls_from_a_loop_do_not_block_it_and_are_all_answered() -> None:
    asyncio.run(twenty_calls())


async def twenty_calls() -> None:
    with Sandbox(size=2, preload=("template.render",)) as sandbox:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        beat = asyncio.create_task(tick())
        calls = [sandbox.acall("template.render", ask(SPIN if i == 3 else GOOD)) for i in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        beat.cancel()
        assert [i for i, a in enumerate(answers) if isinstance(a, Exceeded)] == [3]
        assert sum(isinstance(a, dict) for a in answers) == 19
        assert ticks > 20


def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    """S8: the kernel and the closed pipe both end it, busy or idle."""
    program = (
        "import sys, threading\n"
        "from trine.sandbox import Sandbox\n"
        "s = Sandbox(size=2)\n"
        f"good, spin = {ask(GOOD)!r}, {ask(SPIN)!r}\n"
        "s.warm()\n"
        "print(*s.pids, flush=True)\n"
        "s.call('template.render', spin, cpu=1000.0, wall=1000.0)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout
    handles = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(handles) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(ended(handle) for handle in handles)


def ended(handle: int) -> bool:
    """Whether a process ends within three seconds."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    done = bool(poll.poll(3000))
    os.close(handle)
    return done


def test_a_frame_over_its_limit_is_refused_on_both_sides() -> None:
    frame = pack(Reply(value="x" * 100), 1000)
    assert length(frame[:4], 1000) == len(frame) - 4
    with pytest.raises(TooLong):
        length(frame[:4], 50)
    with pytest.raises(TooLong):
        pack(Call("t", "x" * 100, 1.0, 1, 1), 50)
