"""The command `trine`: serve, chat, generate, plan, bench, pull, list, rm.

Flags come from Config (flags.py). This file knows what each command says to a person, and
nothing of how it is done. Errors that Trine raises on purpose are one line; others are a bug
and keep their traceback.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .bench.datasets import DATASETS
from .bench.workload import WORKS
from .config import environment_keys
from .errors import TrineError
from .flags import PEERS, add_flags, read
from .version import __version__

if TYPE_CHECKING:
    from .core.types import Sampling

ENGINE_GROUPS = {"model", "memory", "scheduling", "device"}
WRONG = 2  # exit status for flags that do not parse


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where to look."""

    def error(self, message: str) -> NoReturn:
        say(f"trine: {message.removeprefix('argument ')} ({self.prog} --help)", error=True)
        sys.exit(WRONG)


def say(text: str = "", *, end: str = "\n", error: bool = False) -> None:
    """To a person, at once."""
    stream = sys.stderr if error else sys.stdout
    stream.write(text + end)
    stream.flush()


def parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    top = Parser(prog="trine", description="An engine for serving large language models.")
    top.add_argument("--version", action="version", version=f"trine {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def verb(name: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help, allow_abbrev=False)
        made.set_defaults(run=run, parser=made)
        return made

    add_flags(verb("serve", "serve a model over HTTP", serve))
    chatting = verb("chat", "talk with a model in this terminal", chat)
    add_flags(chatting, groups=ENGINE_GROUPS)
    chatting.add_argument("--system", default=None, help="a system message to begin with")
    _sampling(chatting, temperature=0.7, min_p=0.05)  # a small model rambles at 1
    generating = verb("generate", "complete a prompt, or each line of standard input", generate)
    add_flags(generating, groups=ENGINE_GROUPS)
    generating.add_argument(
        "--prompt",
        "-p",
        action="append",
        default=None,
        help="a prompt (repeat); without: lines of standard input",
    )
    generating.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, answered through the chat template",
    )
    _sampling(generating)
    planning = verb("plan", "say what would be done, and why, and what fits", plan)
    add_flags(planning)
    planning.add_argument("--json", action="store_true", help="as JSON")
    _bench(verbs)
    pulling = verb("pull", "fetch a model into the cache", pull)
    pulling.add_argument("name", help="a name of the catalog, or a hub id org/name")
    pulling.add_argument("--quiet", action="store_true", help="say nothing but errors")
    verb("list", "models of the catalog and of the cache", list_models)
    removing = verb("rm", "remove a fetched model from the cache", remove)
    removing.add_argument("name", help="a name that `trine list` shows")
    return top


def _sampling(made: argparse.ArgumentParser, temperature: float = 1.0, min_p: float = 0.0) -> None:
    group = made.add_argument_group("sampling")
    for name, kind, default, help in (
        ("temperature", float, temperature, "0: always the likeliest token"),
        ("top-p", float, 1.0, "keep the likeliest tokens that together have this probability"),
        ("top-k", int, 0, "keep this many likeliest tokens; 0: all"),
        ("min-p", float, min_p, "keep tokens at least this likely, relative to the likeliest"),
        ("seed", int, None, "the same seed gives the same text"),
        ("max-tokens", int, 512, "longest answer"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, help=f"{help} (default: {default})")
    group.add_argument("--stop", action="append", default=[], help="text that ends the answer (repeat)")


def _bench(verbs: Any) -> None:
    made = verbs.add_parser("bench", help="measure a running server, or the engine alone").add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )
    _bench_offline(made)
    serving = made.add_parser(
        "serve", help="open-loop load on an OpenAI-compatible server", allow_abbrev=False
    )
    serving.set_defaults(run=bench, parser=serving)
    add = serving.add_argument
    add("--url", "--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--model", default=None, help="default: the first that the server lists")
    add("--api-key", default=None, help="if the server wants one")
    add(
        "--dataset",
        "--dataset-name",
        default="unique",
        choices=DATASETS,
    )
    add("--dataset-path", type=Path, default=None, help="for jsonl: a conversation a line")
    add("--num-prompts", type=int, default=100, help="requests, in multi-turn turns (default: %(default)s)")
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="arrivals a second, a Poisson process (default: all at once)",
    )
    add(
        "--input-len",
        "--random-input-len",
        type=int,
        default=128,
        help="words of a prompt (default: %(default)s)",
    )
    add(
        "--output-len",
        "--random-output-len",
        type=int,
        default=64,
        help="tokens of an answer (default: %(default)s)",
    )
    add("--no-ignore-eos", action="store_true", help="let answers end where the model ends them")
    add("--timeout", type=float, default=600.0, help="seconds for one request (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--result", "--result-filename", type=Path, default=None, help="write JSON here")


def _bench_offline(kinds: Any) -> None:
    made = kinds.add_parser(
        "offline", help="seeded workloads on the engine in this process", allow_abbrev=False
    )
    made.set_defaults(run=bench_offline, parser=made)
    add_flags(made, groups=ENGINE_GROUPS)
    add = made.add_argument_group("workload").add_argument
    add("--workload", required=True, metavar="NAME[,NAME]", help=f"{', '.join(WORKS)}: docs/bench.md")
    add("--repeat", type=_positive, default=1, help="runs of each; the median counts (default: %(default)s)")
    add("--save", type=Path, default=None, metavar="FILE", help="write JSON here")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"a number from 1 to 1000 is wanted, found {text!r}")
    return int(text)


def serve(given: argparse.Namespace) -> int:
    """Serve until SIGTERM; the ready message shows a request that works."""
    from .engine.spawn import early

    config = read(given)
    with early() as process:  # what it imports takes longer than all that is done here
        from .loader.fetch import locate
        from .server.run import serve as run

        with progress(f"fetching {config.model}") as update:
            path = locate(config.model, config.revision, update)
        return run(config, path, ready=_ready, process=process)


def _ready(ready: Any, address: str, config: Any) -> None:
    """What a person reads when the server can be used; `address` is http://host:port."""
    keys = config.api_key or environment_keys()
    key = " -H 'Authorization: Bearer YOUR_KEY'" if keys else ""
    seconds = sum(ready.seconds.values())
    say(f"\nTrine {__version__} serves {ready.model} at {address} (engine ready after {seconds:.1f} s)")
    say(
        f"  context {ready.max_model_len:,} tokens, {ready.max_num_seqs} sequences at once, {ready.pages * ready.page_size:,} tokens of KV"
    )
    say("\nTry it:\n")
    say(f"  curl -N {address}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    say(
        f"""    -d '{{"model": "{ready.model}", "stream": true, "temperature": 0, "max_tokens": 64, "messages": [{{"role": "user", "content": "Name the capital of France."}}]}}'"""
    )
    say("\nStop with Ctrl-C.")


def chat(given: argparse.Namespace) -> int:
    """A conversation; an empty line or end of input ends it."""
    from .llm import LLM

    sampling, llm = _chosen(given), _llm(given)
    messages: list[dict[str, Any]] = [{"role": "system", "content": given.system}] if given.system else []
    say(f"Talking with {llm.ready.model}. An empty line, Ctrl-D or Ctrl-C ends it.", error=True)
    assert isinstance(llm, LLM)
    while line := _line("> "):
        messages.append({"role": "user", "content": line})
        answer = ""
        for text in llm.stream_chat(messages, sampling, stop=given.stop):
            answer += text
            say(text, end="")
        say()
        messages.append({"role": "assistant", "content": answer})
    llm.close()
    return 0


def _line(prompt: str) -> str:
    try:
        return input(prompt if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def generate(given: argparse.Namespace) -> int:
    """Complete prompts; one prompt is streamed, several are answered together, in order."""
    prompts = (
        given.prompt
        if given.prompt is not None
        else [line.rstrip("\n") for line in sys.stdin if line.strip()]
    )
    if not prompts:
        raise TrineError("no prompt: give --prompt TEXT, or lines on standard input")
    failed = False
    sampling, llm = _chosen(given), _llm(given)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    if len(prompts) == 1:
        stream = (
            llm.stream_chat(conversations[0], sampling, stop=given.stop)
            if given.chat
            else llm.stream(prompts[0], sampling, stop=given.stop)
        )
        for text in stream:
            say(text, end="")
        say()
    else:
        bar = sys.stderr.isatty()
        more: dict[str, Any] = {"stop": given.stop, "progress": bar}
        for completion in (
            llm.chat(conversations, sampling, **more)
            if given.chat
            else llm.generate(prompts, sampling, **more)
        ):
            if completion.error is None:
                say(completion.text)
            else:
                failed = True
                say(f"trine: {completion.error}", error=True)
    llm.close()
    return 1 if failed else 0


def _llm(given: argparse.Namespace) -> Any:
    from msgspec import structs

    from .llm import LLM
    from .loader.fetch import locate

    config = read(given)
    with progress(f"fetching {config.model}") as update:
        locate(config.model, config.revision, update)
    options = structs.asdict(config)
    return LLM(options.pop("model"), **options)


def _chosen(given: argparse.Namespace) -> Sampling:
    from .core.types import Sampling

    return Sampling(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=given.seed,
        max_tokens=given.max_tokens,
    )


def plan(given: argparse.Namespace) -> int:
    """Print the plan without starting anything."""
    import msgspec

    from .loader.fetch import locate
    from .plan import resolve

    config = read(given)
    with progress(f"fetching {config.model}") as update:
        path = locate(config.model, config.revision, update)
    made = resolve(config, path, real=False)
    if given.json:
        say(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
        return 0
    wide = max(len(choice.name) for choice in made.choices)
    middle = max(len(choice.value) for choice in made.choices)
    for choice in made.choices:
        say(f"{choice.name:{wide}}  {choice.value:{middle}}  {choice.why}".rstrip())
    say(f"{'fingerprint':{wide}}  {made.fingerprint()}")
    never = [c.name for c in made.choices if c.value == "none" and "not installed" not in c.why]
    if never:
        say(f"this cannot run: nothing serves {', '.join(never)}; the reasons are above", error=True)
    return 1 if never else 0


def bench(given: argparse.Namespace) -> int:
    """Load a server; the table goes to the terminal, the result to a file if asked."""
    import asyncio

    from .bench.serve import Load, run, save, table, writable

    if given.result:
        writable(given.result, "result")
    load = Load(
        url=given.url,
        model=given.model,
        key=given.api_key or next(iter(environment_keys()), None),
        dataset=given.dataset,
        path=given.dataset_path,
        requests=given.num_prompts,
        input_words=given.input_len,
        output=given.output_len,
        rate=given.request_rate,
        seed=given.seed,
        ignore_eos=not given.no_ignore_eos,
        timeout=given.timeout,
    )
    with progress("answers") as update:
        result = asyncio.run(run(load, update))
    say(table(result))
    if given.result:
        save(result, given.result, "result")
        say(f"written to {given.result}")
    return 0 if result["failed"] == 0 else 1


def bench_offline(given: argparse.Namespace) -> int:
    """Measure the engine alone; a line for each result, all of it to a file if asked."""
    from .bench.offline import parse, run
    from .bench.serve import save, writable
    from .engine.start import start
    from .loader.fetch import locate

    config = read(given)
    works = parse(given.workload)
    if given.save:
        writable(given.save, "save")
    with progress(f"fetching {config.model}") as update:
        path = locate(config.model, config.revision, update)
    result = run(config, path, works, start, repeat=given.repeat, tell=say)
    if given.save:
        save(result, given.save, "save")
        say(f"written to {given.save}")
    return 0


def pull(given: argparse.Namespace) -> int:
    from .loader.fetch import locate

    with progress(f"fetching {given.name}", show=not given.quiet) as update:
        path = locate(given.name, None, update)
    if not given.quiet:
        say(str(path))
    return 0


def list_models(_: argparse.Namespace) -> int:
    from .catalog import installed

    for model in installed():
        say(
            f"{model.name:32}  {model.size / 2**20:8.0f} MiB  {'in the cache' if model.path else 'to be fetched':14}  {model.license}"
        )
    return 0


def remove(given: argparse.Namespace) -> int:
    from .catalog import remove as forget

    say(f"removed {given.name}: {forget(given.name) / 2**20:.0f} MiB")
    return 0


@contextmanager
def progress(what: str, *, show: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Gives `update(done, total)`; a bar on stderr where that is a terminal, and only once there is progress."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def update(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total or None)

    try:
        yield update
    finally:
        bar.stop()


def _unknown(word: str, made: argparse.ArgumentParser) -> str:
    """What to say of a word that no flag of this command takes."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"what is {word!r} for? It belongs to no option"
    if name in PEERS:
        return f"there is no {name}: {PEERS[name]}"
    near = difflib.get_close_matches(name, list(made._option_string_actions), 1)
    return f"there is no option {name}{f'; did you mean {near[0]}?' if near else ''}"


def main(arguments: list[str] | None = None) -> None:
    """The entry point. Exit status 1 for what Trine refuses, 2 for flags that do not parse."""
    given, unknown = parser().parse_known_args(arguments)
    if unknown:
        given.parser.error(_unknown(unknown[0], given.parser))
    try:
        status = given.run(given)
    except TrineError as error:
        say(f"trine: {error}", error=True)
        status = 1
    except BrokenPipeError:
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
