"""The bridge: order of launching and sampling, what a request may hold, aborts, and failures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.kit.engine import Kit, fake_kit
from trine.core.types import Batch, Output, Request, Result, Sampling
from trine.engine.checks import FLOATS, INTEGERS
from trine.engine.engine import Engine
from trine.engine.grammars import Next
from trine.errors import RequestError

GREEDY = Sampling(temperature=0.0, seed=0, max_tokens=6)


def ask(id: str, tokens: list[int], **sampling: Any) -> Request:
    return Request(id, tokens, msgspec.structs.replace(GREEDY, **sampling))


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.busy:
        outputs += engine.step()
    return outputs


def test_two_engines_in_one_process_have_nothing_in_common() -> None:
    one, two = fake_kit().engine, fake_kit(depth=2).engine
    one.add(ask("a", [1, 2, 3]))
    two.add(ask("a", [1, 2, 3]))
    while one.busy:
        one.step()
        assert two.busy
    assert drain(two) and one.stats().output_tokens == two.stats().output_tokens


# ---- what a request may hold -------------------------------------------------------------
NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, Any]] = [
    *(
        (f"sampling.{name}", value)
        for name in FLOATS
        for value in (NAN, INF, -INF, 1e9, -1e9, "1", None, True)
    ),
    *((f"sampling.{name}", value) for name in INTEGERS for value in (-1, 2**40, 1.5, NAN, "1", None, True)),
    ("sampling.top_p", 0.0),
    ("sampling.max_tokens", 0),
    ("sampling.min_tokens", 7),
    ("sampling.seed", 2**63),
    ("sampling.seed", 1.5),
    ("sampling.logprobs", -1),
    ("sampling.logprobs", 21),
    ("sampling.stop_ids", (50,)),
    ("sampling.stop_ids", (-1,)),
    ("sampling.stop_ids", (1.5,)),
    ("sampling.stop_ids", tuple(range(10)) * 20),
    ("sampling.stop_ids", "12"),
    ("sampling.bias", {50: 1.0}),
    ("sampling.bias", {1: NAN}),
    ("sampling.bias", {1: 1e6}),
    ("sampling.bias", {"1": 1.0}),
    ("sampling.bias", [(1, 1.0)]),
    ("sampling", None),
    ("tokens", []),
    ("tokens", [50]),
    ("tokens", [-1]),
    ("tokens", [2**40]),
    ("tokens", [1.0]),
    ("tokens", ["1"]),
    ("tokens", None),
    ("tokens", b"1234"),
    ("tokens", [1] * 512),
    ("id", ""),
    ("id", "x" * 200),
    ("id", 5),
    ("space", None),
    ("space", "x" * 300),
    ("emitted", 3),
    ("emitted", -1),
    ("emitted", "0"),
    ("priority", 2**40),
    ("priority", 1.0),
    ("arrived", NAN),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda v: repr(v)[:30])
def test_every_field_is_checked_and_named(field: str, value: Any) -> None:
    engine = fake_kit().engine
    request = ask("a", [1, 2, 3])
    outer, _, inner = field.partition(".")
    if inner:
        request = msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, **{inner: value})
        )
    else:
        request = msgspec.structs.replace(request, **{outer: value})
    with pytest.raises(RequestError) as error:
        engine.add(request)
    assert error.value.field == field
    assert not engine.busy


def test_every_sampling_field_is_in_the_table() -> None:
    """A new field must be checked, or be shown to need none."""
    needs_none = {"ignore_eos"}
    assert set(Sampling.__struct_fields__) == needs_none | {
        f.removeprefix("sampling.") for f, _ in WRONG if f.startswith("sampling.")
    }


def test_a_seed_is_drawn_and_eos_ids_are_folded_in() -> None:
    kit = fake_kit(eos=[3, 4])
    kit.engine.add(ask("a", [1], seed=None, stop_ids=(4, 7)))
    kit.engine.add(ask("b", [1], seed=5, ignore_eos=True))
    a, b = (seq.request.sampling for seq in kit.scheduler.live.values())
    assert a.seed is not None and a.stop_ids == (4, 7, 3)
    assert (b.seed, b.stop_ids) == (5, ())


def test_a_live_id_is_refused() -> None:
    engine = fake_kit().engine
    engine.add(ask("a", [1]))
    with pytest.raises(RequestError, match="alive") as error:
        engine.add(ask("a", [2]))
    assert error.value.field == "id" and error.value.status == 409


# ---- steps -------------------------------------------------------------------------------
class Log:
    """An executor that notes what it is told, and answers when asked."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.batches: dict[int, Batch] = {}
        self.masks: dict[int, Any] = {}
        self.late = False
        self.error: Exception | None = None

    def forward(self, batch: Batch) -> None:
        self.told.append(f"forward {batch.step}")
        self.batches[batch.step] = batch

    def sample(self, batch: Batch, masks: Any) -> None:
        self.told.append(f"sample {batch.step}")
        self.masks[batch.step] = masks

    def done(self, step: int) -> bool:
        return not self.late

    def result(self, step: int) -> Result:
        self.told.append(f"result {step}")
        if self.error:
            raise self.error
        return Result(step, [[5] if row.sample else [] for row in self.batches[step].rows])

    def on_done(self, call: Any) -> None: ...

    def call(self, name: str, **values: Any) -> list[Any]:
        return []

    def close(self) -> None: ...


class Always:
    """A grammar for each request: the next token is always among two."""

    def free(self, request: Request, output: Any) -> int:
        return 0

    def next(self, request: Request, output: Any) -> Next:
        return Next([5, 6])


def logged(depth: int, grammars: Any = None) -> tuple[Engine, Log]:
    log = Log()
    scheduler = fake_kit().scheduler
    return Engine(scheduler, log, vocab=50, grammars=grammars, depth=depth), log


def test_depth_1_waits_and_depth_2_overlaps() -> None:
    engine, log = logged(1)
    engine.add(ask("a", [1], max_tokens=2))
    drain(engine)
    assert log.told == ["forward 1", "sample 1", "result 1", "forward 2", "sample 2", "result 2"]
    engine, log = logged(2)
    engine.add(ask("a", [1], max_tokens=2))
    drain(engine)
    assert log.told == ["forward 1", "sample 1", "forward 2", "sample 2", "result 1", "result 2"]


def test_a_mask_waits_for_the_token_before_it() -> None:
    engine, log = logged(2, Always())
    engine.add(ask("a", [1], max_tokens=3))
    drain(engine)
    assert log.told[:6] == ["forward 1", "sample 1", "forward 2", "result 1", "sample 2", "forward 3"]
    assert log.masks[2] == [[5, 6]]


def test_nothing_is_launched_past_what_is_not_sampled() -> None:
    engine, log = logged(4, Always())
    engine.add(ask("a", [1], max_tokens=9))
    assert [engine.launch() for _ in range(4)] == [True, True, False, False]
    engine.collect()
    assert log.told[-1] == "sample 2"
    assert [engine.launch() for _ in range(2)] == [True, False]


def test_launch_ready_collect() -> None:
    engine, log = logged(2)
    assert not engine.launch() and not engine.ready() and engine.collect() == []
    engine.add(ask("a", [1], max_tokens=5))
    assert engine.launch() and engine.launch() and not engine.launch()
    assert engine.ready()
    log.late = True
    assert not engine.ready()
    log.late = False
    assert [o.tokens for o in engine.collect()] == [[5]]


def test_an_abort_is_told_once_and_unknown_ids_are_ignored() -> None:
    engine, _ = logged(2)
    engine.abort("nobody")
    assert not engine.busy
    engine.add(ask("a", [1, 2], max_tokens=5))
    engine.add(ask("b", [1, 2], max_tokens=5))
    engine.abort("b")
    engine.launch()
    engine.abort("a")
    engine.abort("a")
    outputs = drain(engine)
    assert [(o.id, o.finished, o.tokens) for o in outputs] == [("b", "abort", []), ("a", "abort", [])]
    assert engine.stats().aborted == 2 and engine.stats().held == 0


def test_an_abort_before_anything_ran_is_ready_at_once() -> None:
    engine, _ = logged(1)
    engine.add(ask("a", [1]))
    engine.abort("a")
    assert engine.busy and engine.ready()
    assert [o.finished for o in engine.collect()] == ["abort"]
    assert not engine.busy


def test_a_replay_that_was_over_ends_without_a_step() -> None:
    engine, log = logged(1)
    request = ask("a", [1, 2, 3], max_tokens=2)
    engine.add(msgspec.structs.replace(request, emitted=2))
    (output,) = drain(engine)
    assert (output.tokens, output.finished) == ([], "length")
    assert output.usage and (output.usage.prompt, output.usage.output) == (1, 2)
    assert log.told == []


def test_a_step_that_failed_raises_and_raises_again() -> None:
    engine, log = logged(2)
    engine.add(ask("a", [1], max_tokens=5))
    engine.launch()
    log.error = RuntimeError("the device is gone")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            engine.collect()
    assert engine.busy


def test_forced_tokens_jump_forward_unless_logprobs_are_wanted() -> None:
    def steps(logprobs: int | None) -> tuple[int, int]:
        kit: Kit = fake_kit(depth=2, max_len=200)
        kit.grammars.rules["a"] = 4  # three of each eight output tokens are forced
        kit.engine.add(ask("a", [1, 2, 3], max_tokens=32, logprobs=logprobs))
        outputs = drain(kit.engine)
        assert sum(len(o.tokens) for o in outputs) == 32
        return kit.device.step, kit.device.seen["forced"]

    assert steps(None)[1] == 9  # the last three need no step: they are output as they are
    assert steps(0)[1] == 0
    assert steps(None)[0] < steps(0)[0]


def test_drafts_and_forced_tokens_meet_on_one_sequence() -> None:
    kit = fake_kit(depth=2, drafts=2, max_len=200, skill=1.0)
    kit.grammars.rules["a"] = 4
    kit.engine.add(ask("a", [1, 2, 3], max_tokens=64))
    drain(kit.engine)
    seen = kit.device.seen
    assert seen["forced"] > 0 and seen["accepted"] > 0


def test_the_last_step_and_all_counts_are_told() -> None:
    kit = fake_kit()
    kit.engine.add(ask("a", [1, 2, 3], max_tokens=2))
    kit.engine.step()
    stats = kit.engine.stats()
    assert (stats.step, stats.rows, stats.tokens, stats.running, stats.waiting) == (1, 1, 3, 1, 0)
    assert (stats.prompt_tokens, stats.hit_tokens, stats.computed_tokens, stats.output_tokens) == (3, 0, 3, 1)
    assert (stats.held, stats.reserved_tokens, stats.used_tokens) == (1, 16, 3)
    drain(kit.engine)
    stats = kit.engine.stats()
    assert (stats.finished, stats.running, stats.held) == (1, 0, 0)


def test_a_flush_forgets_what_nobody_uses() -> None:
    kit = fake_kit()
    kit.engine.add(ask("a", list(range(40))))
    drain(kit.engine)
    assert kit.engine.stats().cached == 3
    kit.engine.flush()
    assert kit.engine.stats().cached == 0


# ---- the device's idle time --------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2])
def test_only_waiting_with_work_to_do_counts_as_idle(depth: int) -> None:
    """Each step here says that the device waited a second before it; before the first there was no work."""
    kit = fake_kit(depth=depth)
    take, results = kit.device.result, []

    def result(step: int) -> Result:
        results.append(step)
        return msgspec.structs.replace(take(step), idle=1.0)

    kit.device.result = result  # type: ignore[method-assign]
    for name in ("a", "b"):
        kit.engine.add(ask(name, [1, 2, 3]))
        drain(kit.engine)
    assert kit.engine.stats().idle_seconds == len(results) - 2
    kit.engine.add(ask("c", [1, 2, 3]))
    kit.engine.step()
    kit.engine.abort("c")
    kit.engine.add(ask("d", [1, 2, 3]))
    drain(kit.engine)
    assert kit.engine.stats().idle_seconds == len(results) - (3 if depth == 2 else 4)
