"""The server's life: two listeners in one loop, ready when the engine is, drained at SIGTERM.

It answers health while the engine starts. The public socket never opens beyond loopback
without a key unless that was asked for; the admin socket is a Unix socket of mode 0600.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from trine.config import Config, environment_keys, served_name
from trine.core.messages import Ready
from trine.engine.client import EngineClient
from trine.errors import ConfigError, TrineError
from trine.loader import checkpoint
from trine.log import setup
from trine.metrics import Metrics
from trine.refuse import refuse
from trine.text.chat import ChatTemplate, open_template
from trine.text.tokenizer import Tokenizer

from .app import make_app
from .catalogue import Refusal
from .service import Service
from .wire import Wire

log = logging.getLogger(__name__)
Announce = Callable[[Ready, str, Config], None]
Process = subprocess.Popen[bytes]

BACKLOG = 2048
IDLE_SECONDS = 75  # of a connection without a request
LAST_SECONDS = 5  # for connections to close, after their answers were cut
DESCRIPTORS = 65_536


def serve(config: Config, path: Path, *, ready: Announce, process: Process | None = None) -> int:
    """Serve the model at `path` until SIGTERM or SIGINT; the exit status. `ready(ready, address,
    config)` is called once requests are taken. `process`: an engine's that waits for its orders."""
    setup(config.log_level)
    check_address(config)
    raise_descriptors()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, path, ready, process))


async def _serve(config: Config, path: Path, ready: Announce, process: Process | None) -> int:
    metrics = Metrics()
    engine = EngineClient(config, path, listener=metrics, process=process)
    starting = asyncio.create_task(engine.start())  # takes longest, so it goes first
    opening = asyncio.create_task(asyncio.to_thread(_tokenizer, config, path))
    told = asyncio.Event()
    waiting = asyncio.create_task(told.wait())
    try:
        with on_signals(told.set):
            await asyncio.wait((opening, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():  # told to end before anybody could ask anything
                return 0
            return await _answer(config, engine, opening.result(), metrics, ready, told)
    finally:
        await engine.close()
        waiting.cancel()
        await asyncio.gather(starting, opening, waiting, return_exceptions=True)


def _tokenizer(config: Config, path: Path) -> Tokenizer:
    """What is refused is refused before anybody listens."""
    refuse(config, path)
    tokenizer = Tokenizer.open(path, open_template(config.chat_template))
    checkpoint.forget()
    return tokenizer


async def _answer(
    config: Config,
    engine: EngineClient,
    tokenizer: Tokenizer,
    metrics: Metrics,
    ready: Announce,
    told: asyncio.Event,
) -> int:
    template = ChatTemplate.of(tokenizer)
    service = Service(
        engine,
        tokenizer,
        template if template.exists else None,
        model=served_name(config),
        max_queue=config.max_queue,
        request_timeout=config.request_timeout,
        ranked=config.policy == "priority",
        meter=metrics,
    )
    admin = Path(config.admin_socket) if config.admin_socket else engine.folder.path / "admin"
    front = Front(config, service, admin, told)
    warming = asyncio.create_task(_warm(service, template))
    try:
        return await front.run(engine, ready)
    finally:
        await warming
        template.close()


async def _warm(service: Service, template: ChatTemplate) -> None:
    """While the engine starts. Completions go on without a template that works."""
    try:
        await asyncio.to_thread(service.warm)
        await asyncio.to_thread(template.warm)
    except TrineError as error:
        log.error("%s; chats will be refused: give one that works with --chat-template FILE", error)


class Front:
    """Both listeners over one service."""

    def __init__(
        self, config: Config, service: Service, admin: Path, told: asyncio.Event | None = None
    ) -> None:
        self.config, self.service, self.admin = config, service, admin
        self.apps = [
            make_app(service, config),
            make_app(service, config, admin=True),
        ]
        self.signals = self.status = 0
        self.told = told or asyncio.Event()  # to end
        self.cut = asyncio.Event()  # to end now

    async def run(self, engine: Any, ready: Announce | None = None) -> int:
        """Until told to end, or the engine is given up. The exit status."""
        with on_signals(self.stop), contextlib.ExitStack() as sockets:
            public = sockets.enter_context(listen(self.config.host, self.config.port))
            admin = sockets.enter_context(listen_unix(self.admin))
            listeners = [Listener(app, self.config) for app in self.apps]
            running = [
                asyncio.create_task(listener.serve(sockets=[bound]))
                for listener, bound in zip(listeners, (public, admin), strict=True)
            ]
            for listening in running:  # one that ends by itself ends the server
                listening.add_done_callback(self._alone)
            try:
                return await self._life(engine, ready, address(self.config.host, public))
            finally:
                self.told.set()  # a start that failed ends the listeners too: none of them by itself
                for listener in listeners:
                    listener.should_exit = True
                await asyncio.wait(running, timeout=LAST_SECONDS + 2)
                with contextlib.suppress(OSError):
                    self.admin.unlink()

    def stop(self) -> None:
        """What SIGTERM does: drain; a second time: now."""
        self.signals += 1
        self.told.set()
        if self.signals > 1:
            self.cut.set()

    def _alone(self, listening: asyncio.Task[None]) -> None:
        if not self.told.is_set():
            log.critical("a listener ended by itself", exc_info=listening.exception())
            self.status = 1
            self.told.set()

    async def _life(self, engine: Any, ready: Announce | None, where: str) -> int:
        if await self._unless_told(engine.start()):
            if self.service.meter:
                self.service.meter.started(engine.ready)
            if ready:
                ready(engine.ready, where, self.config)
        dead = await self._unless_told(engine.ended())
        if not self.told.is_set():
            log.critical("there is no engine any more: %s", dead)
            return 1
        await self._drain()
        return self.status

    async def _unless_told(self, work: Any) -> Any:
        """What `work` gives, or None when the end comes first."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self.told.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self) -> None:
        """Refuse what is new, let what runs finish for a while, then end it with an error."""
        self.service.draining = True
        waits = [asyncio.ensure_future(event.wait()) for event in (self.service.idle, self.cut)]
        await asyncio.wait(waits, timeout=self.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if left := self.service.stop_all(Refusal("shutting_down")):
            log.warning("%d requests were ended by the shutdown", left)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.service.idle.wait(), LAST_SECONDS)
        self.service.close()


class Listener(uvicorn.Server):
    """uvicorn on one socket, without its signals, logs of requests, headers and websockets."""

    def __init__(self, app: Any, config: Config) -> None:
        options: dict[str, Any] = {
            "http": partial(Wire, max_body=config.max_body_bytes),
            "ws": "none",
            "lifespan": "off",
            "interface": "asgi3",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "backlog": BACKLOG,
            "timeout_keep_alive": IDLE_SECONDS,
            "timeout_graceful_shutdown": LAST_SECONDS,
        }
        super().__init__(uvicorn.Config(app, **options))

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@contextlib.contextmanager
def on_signals(call: Callable[[], None]) -> Iterator[None]:
    """Who tells the server to end calls this, instead of whoever was called before."""
    loop, names = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for name in names:
        loop.add_signal_handler(name, call)
    try:
        yield
    finally:
        for name in names:
            loop.remove_signal_handler(name)


def check_address(config: Config) -> None:
    """Refuse to open to a network without a key."""
    if not (loopback(config.host) or config.api_key or environment_keys() or config.insecure):
        raise ConfigError(
            f"{config.host} is reachable from other machines: give --api-key KEY or TRINE_API_KEY, "
            "or --insecure if that is meant",
            "host",
        )


def loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A bound TCP socket; ConfigError if the address cannot be had."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", "port") from None
    with bound:
        bound.setblocking(False)
        yield bound


@contextlib.contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """A bound Unix socket that nobody else may open, from the moment it is there."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            if asked.connect_ex(str(path)) == 0:
                raise ConfigError("the admin socket is another server's", "admin_socket")
        path.unlink()  # of a server that did not end well
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        raise ConfigError(
            f"cannot make the admin socket: {error.strerror or error}", "admin_socket"
        ) from None
    finally:
        os.umask(mask)
    with bound:
        bound.setblocking(False)
        yield bound


def address(host: str, bound: socket.socket) -> str:
    """Where a client on this machine finds it."""
    name = "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "::" else host
    name = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"http://{name}:{bound.getsockname()[1]}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


def raise_descriptors() -> None:
    """A connection is a descriptor: allow as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
