"""A worker behind the engine: whatever the schedule, each request gets the tokens it gets alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from trine.cache.manager import Cache
from trine.core.types import Batch, Group, Join, Logprob, Request, Row, Sampling
from trine.engine.engine import Engine
from trine.errors import Unsupported
from trine.executor.direct import DirectExecutor
from trine.executor.local import LocalExecutor
from trine.plan import Plan
from trine.platforms.cpu import Cpu
from trine.registry import get
from trine.runtime.worker import Worker
from trine.scheduler.scheduler import Scheduler

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 101, 32, 48, 4, 2, 8, 2
CONTEXT = 400
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
Said = dict[str, tuple[list[int], list[Logprob]]]


def write_model(folder: Path, seed: int) -> Path:
    """A tiny llama whose attention matters: its tokens change with any of its context."""
    generator = torch.Generator().manual_seed(seed)

    def weight(outs: int, ins: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(outs, ins, generator=generator) * scale / ins**0.5

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN, 4.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN, 3.0),
    }
    for i in range(LAYERS):
        block = f"model.layers.{i}."
        tensors |= {
            block + "input_layernorm.weight": torch.ones(HIDDEN),
            block + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            block + "self_attn.q_proj.weight": weight(HEADS * DIM, HIDDEN, 2.0),
            block + "self_attn.k_proj.weight": weight(KV_HEADS * DIM, HIDDEN, 2.0),
            block + "self_attn.v_proj.weight": weight(KV_HEADS * DIM, HIDDEN, 3.0),
            block + "self_attn.o_proj.weight": weight(HIDDEN, HEADS * DIM, 3.0),
            block + "mlp.gate_proj.weight": weight(INNER, HIDDEN, 2.0),
            block + "mlp.up_proj.weight": weight(INNER, HIDDEN, 2.0),
            block + "mlp.down_proj.weight": weight(HIDDEN, INNER, 2.0),
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one", 1)


def make_plan(path: Path, **changes: object) -> Plan:
    plan = Plan(
        model="tiny",
        path=str(path),
        family="llama",
        load_format="auto",
        dtype="int8",
        product="exact",
        platform="cpu",
        attention="reference",
        page_size=4,
        groups=[Group(400)],
        layer_groups=[0] * LAYERS,
        max_model_len=CONTEXT,
        max_num_seqs=16,
        budget=64,
        depth=1,
        policy="fcfs",
        capacity="max-use",
        batch_invariant=True,
        threads=1,
        seed=0,
        vocab=VOCAB,
        eos=[],
    )
    return msgspec.structs.replace(plan, **changes)


class Running:
    """An engine over a worker of its own."""

    def __init__(self, plan: Plan, worker: Callable[[Plan], Worker] = Worker) -> None:
        direct = get("platforms", plan.platform).asynchronous
        self.executor = (DirectExecutor if direct else LocalExecutor)(lambda: worker(plan))
        scheduler = Scheduler(
            Cache(plan.groups, plan.page_size),
            slots=plan.max_num_seqs,
            budget=plan.budget,
            max_len=plan.max_model_len,
            policy=get("scheduler.policies", plan.policy)(),
            capacity=plan.capacity,
        )
        self.engine = Engine(scheduler, self.executor, vocab=plan.vocab, depth=plan.depth)
        self.said: Said = {}

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error is None
            tokens, logprobs = self.said.setdefault(output.id, ([], []))
            tokens += output.tokens
            logprobs += output.logprobs or []

    def run(self, requests: list[Request], arrivals: int = 10**9) -> Said:
        """All of them, `arrivals` coming before each step."""
        coming = list(requests)
        while coming or self.engine.busy:
            for request in coming[:arrivals]:
                self.engine.add(request)
            coming = coming[arrivals:]
            self.step()
        return self.said

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.executor.close()


def make_requests() -> list[Request]:
    """Shared stems that end inside pages, long and short prompts, every kind of sampling."""
    rng = random.Random(2)
    stem = [rng.randrange(VOCAB) for _ in range(70)]
    samplings = [
        Sampling(temperature=0.0),
        Sampling(),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(top_k=5, min_p=0.05, repetition=1.3),
        Sampling(temperature=0.0, presence=0.7, frequency=0.4, logprobs=3),
        Sampling(temperature=1.5, bias={5: 3.0, 6: -4.0}, logprobs=0),
        Sampling(min_tokens=6, stop_ids=tuple(range(30)), ignore_eos=True),
    ]
    requests = []
    for i in range(16):
        shared = stem[: rng.choice([0, 13, 38, 66, 70])]
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 30]))]
        sampling = msgspec.structs.replace(
            samplings[i % len(samplings)], seed=100 + i, max_tokens=rng.randint(6, 14)
        )
        requests.append(Request(f"r{i}", shared + own, sampling))
    return requests


@pytest.fixture(scope="module")
def alone(path: Path) -> Said:
    """Each request by itself, nothing cached."""
    said: Said = {}
    with Running(make_plan(path, budget=CONTEXT)) as running:
        for request in make_requests():
            said |= running.run([request])
            running.engine.flush()
    return said


SCHEDULES = {
    "together": {},
    "overlapped": {"depth": 2},
    "small chunks": {"budget": 7},
    "small chunks, overlapped": {"budget": 5, "depth": 2},
    "one token a step": {"budget": 1, "max_num_seqs": 3},
    "tiny pool": {"groups": [Group(34)], "budget": 40},
    "tiny pool, overlapped": {"groups": [Group(34)], "budget": 24, "depth": 2},
    "pages of one": {"page_size": 1, "groups": [Group(1500)]},
    "pages of 16, deep": {"page_size": 16, "groups": [Group(30)], "depth": 3, "budget": 33},
    "prefix policy": {"policy": "prefix", "max_num_seqs": 4, "depth": 2},
    "never preempted": {"capacity": "no-evict", "groups": [Group(60)]},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_same_tokens(name: str, path: Path, alone: Said) -> None:
    """Tokens, logprobs and ranks, bit for bit."""
    with Running(make_plan(path, **SCHEDULES[name])) as running:
        said = running.run(make_requests(), arrivals=16 if name == "together" else 3)
        stats = running.engine.stats()
    assert said == alone
    assert stats.hit_tokens > 0


class Line:
    """Orders of a device that works by itself: time is counted in events, and passes when somebody waits."""

    def __init__(self) -> None:
        self.ordered = self.reached = 0


class Mark:
    """A point in a line of orders."""

    def __init__(self, line: Line) -> None:
        self.line, self.at = line, 0

    def record(self) -> None:
        self.line.ordered += 1
        self.at = self.line.ordered

    def done(self) -> bool:
        return self.at <= self.line.reached

    def wait(self) -> None:
        self.line.reached = max(self.line.reached, self.at)

    def since(self, earlier: Mark) -> float:
        assert self.done() and earlier.done(), "a time is asked for that is not known yet"
        return float(self.at - earlier.at)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_works_by_itself(
    depth: int, path: Path, alone: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders go straight to the worker, another thread waits for results, times are those of events."""
    monkeypatch.setattr(Cpu, "asynchronous", True)
    line = Line()
    monkeypatch.setattr(Cpu, "event", lambda self: Mark(line))
    told = []
    with Running(make_plan(path, depth=depth, budget=30)) as running:
        assert isinstance(running.executor, DirectExecutor)
        running.executor.on_done(lambda: told.append(1))
        said = running.run(make_requests(), arrivals=3)
        stats = running.engine.stats()
    assert said == alone
    assert stats.seconds == 2.0, "from the start to the end, with the sampler's event between"
    assert len(told) == stats.step, "somebody was told of each step"
    assert 0 < stats.idle_seconds < stats.step, "one event apart, but for the first"


@pytest.mark.parametrize(("dtype", "kept"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_other_arithmetic(dtype: str, kept: torch.dtype, path: Path) -> None:
    requests = make_requests()[:7]
    plan = make_plan(path, dtype=dtype, kv_dtype=dtype, product="reference")
    apart: Said = {}
    with Running(plan) as running:
        for request in requests:
            apart |= running.run([request])
            running.engine.flush()
    with Running(msgspec.structs.replace(plan, depth=2, budget=19)) as running:
        assert running.run(requests, arrivals=2) == apart
    assert Worker(plan).store.layer(0)[0].dtype == kept


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_nothing(depth: int, path: Path) -> None:
    """Short prompts and long answers in a pool that holds two of six: penalties count what was said before."""
    sampling = Sampling(seed=3, max_tokens=40, frequency=0.5, repetition=1.1, logprobs=1)
    requests = [Request(f"r{i}", [7, i, 9], msgspec.structs.replace(sampling, seed=i)) for i in range(6)]
    with Running(make_plan(path)) as running:
        roomy = running.run(requests)
    with Running(make_plan(path, depth=depth, groups=[Group(24)])) as running:
        assert running.run(requests) == roomy
        assert running.engine.stats().preemptions > 2


def test_the_requests_differ_and_say_what_was_asked(alone: Said) -> None:
    requests = {request.id: request for request in make_requests()}
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(requests)
    for id, (tokens, logprobs) in alone.items():
        sampling = requests[id].sampling
        assert len(tokens) == sampling.max_tokens or tokens[-1] in sampling.stop_ids
        assert len(tokens) >= sampling.min_tokens
        assert len(logprobs) == (0 if sampling.logprobs is None else len(tokens))
        for token, seen in zip(tokens, logprobs, strict=False):
            assert seen.token == token and len(seen.top) == sampling.logprobs
            assert seen.rank > len(seen.top) or seen.top[seen.rank - 1] == (token, seen.logprob)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cached_prompt_gives_the_same_logprobs(depth: int, path: Path) -> None:
    """The same prompts again, wholly cached but for one token, at a page border and beside it."""
    rng = random.Random(6)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (63, 64, 65, 300)]
    sampling = Sampling(temperature=0.8, seed=5, max_tokens=8, logprobs=4)
    with Running(make_plan(path, depth=depth)) as running:
        first = running.run([Request(f"a{i}", p, sampling) for i, p in enumerate(prompts)])
        before = running.engine.stats()
        again = running.run([Request(f"b{i}", p, sampling) for i, p in enumerate(prompts)])
        after = running.engine.stats()
        assert after.hit_tokens - before.hit_tokens == sum(len(p) - 1 for p in prompts)
        for i in range(len(prompts)):
            assert first[f"a{i}"] == again[f"b{i}"]


def test_a_replay_goes_on_where_it_was(path: Path, alone: Said) -> None:
    """A new engine is given what the client has seen already: penalties and min_tokens count it."""
    with Running(make_plan(path)) as running:
        replays, expected = [], {}
        for i, request in enumerate(make_requests()):
            tokens, logprobs = alone[request.id]
            seen = min(i % 5, len(tokens) - 1)
            replays.append(
                Request(request.id, request.tokens + tokens[:seen], request.sampling, emitted=seen)
            )
            expected[request.id] = tokens[seen:], logprobs[seen:]
        assert running.run(replays) == expected


def test_an_abort_leaves_the_others_alone(path: Path, alone: Said) -> None:
    requests = make_requests()
    with Running(make_plan(path, depth=2, budget=30)) as running:
        for request in requests:
            running.engine.add(request)
        for turn in range(12):
            running.step()
            running.engine.abort(f"r{turn}")
        running.run([])
        for id, (tokens, _) in running.said.items():
            assert tokens == alone[id][0][: len(tokens)]
        for request in requests[12:]:
            assert running.said[request.id] == alone[request.id]


def test_two_engines_with_two_models_in_one_process(path: Path, alone: Said, tmp_path: Path) -> None:
    """Turn by turn: no state is shared. The other one has another model, dtype and page size."""
    other = write_model(tmp_path / "two", 2)
    plans = make_plan(path), make_plan(other, dtype="float32", product="reference", page_size=8, depth=2)
    with Running(plans[0]) as one, Running(plans[1]) as two, Running(plans[1]) as quiet:
        for request in make_requests():
            one.engine.add(request)
            two.engine.add(request)
        while one.engine.busy or two.engine.busy:
            one.step()
            two.step()
        assert one.said == alone
        assert two.said == quiet.run(make_requests())
        assert two.said != alone


def test_a_poisoned_row_poisons_nobody(path: Path) -> None:
    """One slot's KV and logits are made NaN: it says so, its neighbours notice nothing, and neither does
    who gets its pages after it."""
    ids = torch.tensor([3, 1, 4], dtype=torch.int32).numpy().tobytes()
    worker = Worker(make_plan(path, groups=[Group(12)]))
    sampling = Sampling(temperature=0.0, seed=0, logprobs=1)
    with torch.inference_mode():
        worker.store.groups[0].fill_(float("nan"))
    worker.forward(Batch(1, [Row(1, 3, True)], [Join(1, ids, 3, [[1]], 0, sampling)]))
    worker.sample(Batch(1, [Row(1, 3, True)]), None)
    clean = worker.result(1)
    joins = [Join(2, ids, 3, [[2]], 2, sampling), Join(3, ids, 3, [[3]], 0, sampling)]
    rows = [Row(2, 1, True), Row(3, 3, True)]  # the first of them reads two positions of NaN
    worker.forward(Batch(2, rows, joins))
    worker.sample(Batch(2, rows), None)
    result = worker.result(2)
    assert result.tokens[1] == clean.tokens[0] and result.logprobs and clean.logprobs
    assert result.logprobs == [[], clean.logprobs[0]]
    assert result.errors == ["no finite logit", None] and clean.errors is None
    worker.forward(Batch(3, [Row(2, 3, True)], [Join(2, ids, 3, [[2]], 0, sampling)]))
    worker.sample(Batch(3, [Row(2, 3, True)]), None)
    assert worker.result(3).logprobs == clean.logprobs


def test_what_a_worker_says_of_itself(path: Path) -> None:
    worker = Worker(make_plan(path))
    assert set(worker.call("seconds")) >= {"load", "model", "kv"}
    assert worker.call("memory")["kv"] == 2 * LAYERS * 400 * 4 * KV_HEADS * DIM * 4
    with pytest.raises(Unsupported, match="dance"):
        worker.call("dance")
    with pytest.raises(Unsupported, match="drafts"):
        worker.forward(Batch(1, [Row(1, 2, True, 1)]))
