"""``kvstore serve``: the daemon, in the foreground."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from prometheus_client import CollectorRegistry

from kvstore import __version__
from kvstore.assembly import build_shared
from kvstore.config import Settings, load_with_origins, redacted, variable_of
from kvstore.daemon.handshake import Terms
from kvstore.daemon.lifecycle import BusyPoll, SocketPlace, run
from kvstore.daemon.server import Server
from kvstore.errors import ConfigError
from kvstore.metrics import register_daemon
from kvstore.sizes import size

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.admin.server import AdminServer
    from kvstore.pool import Pool
    from kvstore.tiers.shared import SharedDramStore

logger = logging.getLogger(__name__)


class _ServeCommand(click.Command):
    """Says of an option that there is not, and that is a setting, where to set it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name not in Settings.model_fields:
                raise
            variable = variable_of(name)
            places = f"{variable}, or {name} in the file" if variable else f"{name} in the file"
            raise click.UsageError(
                f"No such option '{error.option_name}'. Set {places}.", ctx
            ) from None


@click.command(cls=_ServeCommand)
@click.option("--config", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--socket", help="Unix socket where clients connect.")
@click.option("--dram", metavar="SIZE", help="Host memory for blocks, such as 8GiB.")
@click.option("--disk", metavar="SIZE", help="Disk space for blocks, such as 200GiB.")
@click.option(
    "--disk-path", metavar="DIR", help="Directory of the disk tier, for this daemon alone."
)
@click.option("--huge-pages", type=click.Choice(["off", "transparent", "reserved"]))
@click.option("--block-tokens", type=int, help="Tokens of one block.")
@click.option("--lease-timeout", "lease_timeout_s", type=float, metavar="SECONDS")
@click.option("--max-clients", type=int, help="Connections held at once.")
@click.option("--node", help="Name of the daemon.")
@click.option("--tcp-port", type=int, help="Listen on this port of 127.0.0.1 too; needs a token.")
@click.option("--admin-host", help="Address of the admin REST API.")
@click.option("--admin-port", type=int, help="Port of the admin REST API; 0 for any free one.")
@click.option("--token-file", help="File with the secret of TCP and REST clients.")
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=float,
    metavar="SECONDS",
    help="Time that clients get to finish when the daemon is told to stop.",
)
def serve(config: Path | None, **flags: str | float | None) -> None:
    """Run the daemon that shares one cache among the engines of this host.

    Flags override the environment (KVSTORE_*), which overrides the file. The line "ready …" on
    standard error says that clients can connect. SIGTERM stops it in order. Settings without a flag
    (`kvstore config show --describe`) come from the environment or the file.
    """
    settings, origins = load_with_origins(flags, file=config)
    _log_to_stderr()
    signal.signal(signal.SIGTERM, _stop_before_ready)
    with ExitStack() as stack:
        place = stack.enter_context(SocketPlace(settings.socket))
        daemon = Daemon(settings, origins)
        stack.callback(daemon.close)
        daemon.start()
        run(
            BusyPoll(settings.busy_poll_us * 1e-6, time.monotonic),  # noqa: TID251
            daemon.make_server,
            lambda: _listeners(place, settings),
            daemon.announce,
            settings.drain_timeout_s,
        )


class Daemon:
    """What a running daemon is made of: the admin API first, so that it can say what is going on."""

    def __init__(self, settings: Settings, origins: dict[str, str]) -> None:
        """Start the admin API, if there is one."""
        self._settings = settings
        self._origins = origins
        self._registry = CollectorRegistry()
        self._epoch = os.urandom(8)
        self._server: Server | None = None
        self._parts: tuple[Pool, SharedDramStore] | None = None
        self._source: Any = None
        self._admin = self._start_admin() if settings.admin_port is not None else None

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Where the admin API listens, if there is one."""
        return None if self._admin is None else self._admin.address

    def start(self) -> None:
        """Take the memory, which can need seconds for many GiB."""
        wanted = self._settings.dram
        hidden = not (self._settings.prefault and sys.stderr.isatty())
        with click.progressbar(
            length=wanted, label="Providing memory", file=sys.stderr, hidden=hidden
        ) as bar:
            tell = _Progress(wanted, time.monotonic)  # noqa: TID251

            def on_progress(done: int) -> None:
                tell(done)
                bar.update(done - bar.pos)

            self._parts = build_shared(self._settings, self._registry, on_progress)
        stats = self._parts[1].arena_stats()
        logger.info(
            "memory is there after %.1f s, %s on huge pages",
            stats.prefault_s,
            size(stats.huge_page_bytes),
        )

    def make_server(self) -> Server:
        """Return the server; on the event loop."""
        assert self._parts is not None
        pool, store = self._parts
        settings = self._settings
        terms = Terms(
            node=settings.node,
            epoch=self._epoch,
            socket=str(settings.socket),
            lease_timeout_s=settings.lease_timeout_s,
            release=__version__,
            max_clients=settings.max_clients,
            max_session_bytes=settings.max_session_bytes,
            token=settings.token.get_secret_value() if settings.token else None,
        )
        clock = time.monotonic  # noqa: TID251  (a command picks the clock; the pool has the same)
        server = self._server = Server(pool, store, terms, clock)
        register_daemon(server.status, self._registry)
        if self._source is not None:
            self._source.status = self._server.status
            self._source.pool = pool
        return server

    def announce(self) -> None:
        """Tell whoever started the daemon that it serves."""
        line = f"ready unix://{self._settings.socket} node={self._settings.node} epoch={self._epoch.hex()}"
        if self.admin_address is not None:
            host, port = self.admin_address
            line += f" admin=http://{f'[{host}]' if ':' in host else host}:{port}"
        if self._settings.tcp_port:
            line += f" tcp=127.0.0.1:{self._settings.tcp_port}"
        click.echo(line, err=True)

    def close(self) -> None:
        """End the admin API, and give the memory back."""
        if self._admin is not None:
            self._admin.close()
        if self._parts is not None:
            self._parts[0].close()

    def _start_admin(self) -> AdminServer:
        from kvstore.admin.app import Source, create_app
        from kvstore.admin.server import AdminServer

        def unknown() -> Any:  # noqa: ANN401
            raise AssertionError("asked for while starting")

        settings = self._settings
        self._source = Source(
            pool=None,
            status=unknown,
            config=self._config,
            registry=self._registry,
            token=settings.token.get_secret_value() if settings.token else None,
            ready=self._ready,
        )
        assert settings.admin_port is not None
        return AdminServer(create_app(self._source), settings.admin_host, settings.admin_port)

    def _config(self) -> dict[str, dict[str, object]]:
        return {
            name: {"value": value, "origin": self._origins[name]}
            for name, value in redacted(self._settings).items()
        }

    def _ready(self) -> tuple[bool, str]:
        state = self._server.state if self._server else "starting"
        return state == "ready", state


def _stop_before_ready(*_: object) -> NoReturn:
    logger.info("stopped before it was ready")
    sys.exit(0)


class _Progress:
    """Logs now and then how much memory is there: a log has no progress bar."""

    EVERY_S = 10.0

    def __init__(self, wanted: int, clock: Callable[[], float]) -> None:
        self._wanted, self._clock = wanted, clock
        self._told_at: float | None = None

    def __call__(self, done: int) -> None:
        """Hear that ``done`` bytes are there."""
        now = self._clock()
        if self._told_at is None or now - self._told_at >= self.EVERY_S:
            self._told_at = now
            logger.info("providing memory for blocks: %s of %s", size(done), size(self._wanted))


def _listeners(place: SocketPlace, settings: Settings) -> list[socket.socket]:
    listeners = [place.listen()]
    if settings.tcp_port:
        if settings.token is None:
            raise ConfigError(f"tcp_port={settings.tcp_port} needs a token: set token_file")
        try:
            listeners.append(socket.create_server(("127.0.0.1", settings.tcp_port)))
            listeners[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            listeners[0].close()
            raise ConfigError(
                f"tcp_port={settings.tcp_port} cannot be had: {error.strerror}; choose another, or stop "
                "what uses it"
            ) from None
    return listeners


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
