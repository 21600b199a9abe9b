"""Fixtures: models, daemons, engines. Without vLLM nothing here is collected."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.vllm.engine import Daemon, Engine

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the model that most tests use."""
    from tests.engines.vllm.models import write_model

    return str(write_model(tmp_path_factory.mktemp("models") / "llama", "llama"))


@pytest.fixture(scope="module")
def start_engine(
    llama: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """A function that starts an engine with :class:`EngineOptions`; those that still run are ended."""
    from tests.engines.vllm.engine import Engine
    from tests.engines.vllm.messages import EngineOptions

    directory = tmp_path_factory.mktemp("engines")
    number = count()

    with ExitStack() as stack:

        def start(**options: object) -> Engine:
            given = {"model": llama, "environment": {"HOME": str(directory)}} | options
            name = f"engine-{next(number)}.log"
            engine = Engine(EngineOptions(**given), directory / name)  # type: ignore[arg-type]
            stack.callback(engine.kill)
            return engine

        yield start


@pytest.fixture(scope="module")
def start_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """A function that starts a daemon of its own; those that still run are ended."""
    from tests.engines.vllm.engine import Daemon

    with ExitStack() as stack:

        def start(**options: str) -> Daemon:
            directory: Path = tmp_path_factory.mktemp("daemon")
            daemon = Daemon(directory, **options)
            stack.callback(daemon.kill)
            return daemon.start()

        yield start


@pytest.fixture(scope="session")
def reference(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without a connector and without a prefix cache."""
    from tests.engines.vllm.engine import Engine
    from tests.engines.vllm.messages import EngineOptions

    directory = tmp_path_factory.mktemp("reference")
    environment = {"HOME": str(directory)}
    engine = Engine(EngineOptions(model=llama, environment=environment), directory / "engine.log")
    yield engine
    engine.close()
