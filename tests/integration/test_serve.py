"""``kvstore serve`` as a process: its socket, its signals, what it says."""

from __future__ import annotations

import json
import os
import re
import resource
import selectors
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.cli.main import build
from kvstore.cli.serve import Daemon
from kvstore.config import load_with_origins
from kvstore.daemon.lifecycle import BusyPoll, SocketPlace
from kvstore.errors import ConfigError
from kvstore.protocol import Acquire, Held, Lookup, Number, Release, Reserve, Status, Welcome
from kvstore.testing import FakeClock
from tests.integration.test_daemon import ENCODED, Raw, hello, hold, key, until

READY = r"ready unix://(\S+) node=(\S+) epoch=([0-9a-f]{16})( admin=http://(\S+):(\d+))?( tcp=\S+)?"
TOKEN = "0123456789abcdef-secret"


class TestSocketPlace:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "kv.sock"

    def test_only_this_user_can_connect_and_nothing_is_left(self, path):
        with SocketPlace(path) as place:
            place.listen().close()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(Path(f"{path}.lock").stat().st_mode) == 0o600
        assert not path.exists()
        SocketPlace(path).close()

    def test_the_file_mode_of_the_process_is_kept(self, path):
        before = os.umask(0o022)
        try:
            with SocketPlace(path) as place:
                place.listen().close()
            assert os.umask(0o022) == 0o022
        finally:
            os.umask(before)

    def test_a_second_daemon_is_refused_by_the_first_ones_number(self, path):
        with SocketPlace(path) as place:
            listener = place.listen()
            with pytest.raises(ConfigError, match=rf"\(pid {os.getpid()}\) serves {path}"):
                SocketPlace(path)
            assert path.exists()
            listener.close()
        SocketPlace(path).close()

    @pytest.mark.parametrize("busy", [False, True])
    def test_a_second_daemon_is_refused_also_when_the_lock_was_removed(self, path, busy):
        with SocketPlace(path) as first, first.listen() as listener, ExitStack() as clients:
            listener.listen(0 if busy else 8)
            while busy:
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                try:
                    client.connect(str(path))
                except BlockingIOError:
                    break
            Path(f"{path}.lock").unlink()
            inode = path.stat().st_ino
            with SocketPlace(path) as second, pytest.raises(ConfigError, match="nobody locked out"):
                second.listen()
            assert path.stat().st_ino == inode

    def test_the_socket_of_a_daemon_that_was_killed_is_replaced(self, path):
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))
        inode = path.stat().st_ino
        with SocketPlace(path) as place, place.listen() as listener:
            listener.listen()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
        assert not path.exists()
        assert inode

    @pytest.mark.parametrize("kind", ["file", "directory", "link to a socket"])
    def test_what_is_not_ours_is_not_removed(self, path, kind):
        if kind == "file":
            path.write_text("precious")
        elif kind == "directory":
            path.mkdir()
        else:
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path.parent / "other"))
            path.symlink_to(path.parent / "other")
        with SocketPlace(path) as place, pytest.raises(ConfigError, match="no socket of this user"):
            place.listen()
        assert path.lstat()
        if kind == "file":
            assert path.read_text() == "precious"
        if kind == "link to a socket":
            assert (path.parent / "other").exists()

    def test_what_somebody_else_put_there_meanwhile_stays(self, path):
        with SocketPlace(path) as place:
            place.listen().close()
            path.rename(path.parent / "moved")  # so that the new file has another inode
            path.write_text("precious")
        assert path.read_text() == "precious"

    def test_a_link_is_not_followed_to_a_lock(self, path):
        target = path.parent / "target"
        Path(f"{path}.lock").symlink_to(target)
        with pytest.raises(ConfigError, match="cannot open"):
            SocketPlace(path)
        assert not target.exists()

    def test_long_paths_and_missing_directories(self, path):
        with pytest.raises(ConfigError, match="at most 107"):
            SocketPlace(path.parent / ("x" * 107))
        with pytest.raises(ConfigError, match=f"mkdir -p -m 700 {path.parent}/none"):
            SocketPlace(path.parent / "none" / "kv.sock")


class TestBusyPoll:
    """Looks for a while, then sleeps."""

    @pytest.fixture
    def waits(self, monkeypatch):
        """What the kernel was asked to wait; it is asked at most a hundred times, and has no event."""
        waits = []

        def select(selector, timeout=None):
            waits.append(timeout)
            assert len(waits) < 100, "it never sleeps"
            return []

        monkeypatch.setattr(selectors.EpollSelector, "select", select)
        return waits

    @pytest.mark.parametrize("timeout", [None, 60.0])
    def test_it_sleeps_when_nothing_came(self, waits, timeout):
        ticks = count(step=0.25)
        with BusyPoll(1.0, lambda: next(ticks)) as selector:
            assert selector.select(timeout) == []
        assert waits == [0, 0, 0, timeout]

    @pytest.mark.parametrize("timeout", [0, 0.5])
    def test_a_short_wait_is_left_to_the_kernel(self, waits, timeout):
        with BusyPoll(1.0, FakeClock()) as selector:
            assert selector.select(timeout) == []
        assert waits == [timeout]

    def test_an_event_ends_it_at_once(self):
        clock = FakeClock()
        reading, writing = socket.socketpair()
        with BusyPoll(1.0, clock) as selector, reading, writing:
            selector.register(reading, selectors.EVENT_READ)
            writing.send(b"x")
            ((key_, events),) = selector.select(None)
        assert (key_.fileobj, events) == (reading, selectors.EVENT_READ)
        assert clock.now_s == 0


class Process:
    """``kvstore serve`` with ``flags``; its standard error is collected line by line."""

    def __init__(self, path, *flags, **environment):
        self.path = path
        self.lines = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve", f"--socket={path}", "--dram=1MiB", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self):
        return self._process.pid

    def num_descriptors(self):
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def running(self):
        return self._process.poll() is None

    @property
    def ready(self):
        """The match of the line that says that clients can connect."""
        found = [match for line in list(self.lines) if (match := re.fullmatch(READY, line))]
        return found[0] if found else None

    def wait_ready(self):
        until(lambda: self.ready or not self.running)
        assert self.ready, self.lines
        return self.ready

    def signal(self, number):
        self._process.send_signal(number)

    def wait(self):
        code = self._process.wait(30)
        self._reader.join()
        return code

    def close(self):
        if self.running:
            self._process.kill()
        self.wait()
        self._process.stderr.close()


@pytest.fixture
def serve(tmp_path):
    opened = []

    def start(*flags, **environment):
        process = Process(tmp_path / "kv.sock", "--block-tokens=4", *flags, **environment)
        opened.append(process)
        return process

    yield start
    for process in opened:
        process.close()


def connected(process):
    client = Raw(process.path)
    assert isinstance(client.ask(hello()), Welcome)
    return client


def is_refused(path):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
    return False


def get(url, token=None):
    """Return status and body."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class TestServe:
    def test_it_says_when_it_is_ready_serves_and_ends(self, serve):
        process = serve("--node=here")
        ready = process.wait_ready()
        assert ready[1] == str(process.path)
        assert (ready[2], ready[4]) == ("here", None)
        with connected(process) as client:
            status = client.ask(Status(1)).status
            assert (status.epoch, status.node, status.state) == (ready[3], "here", "ready")
            assert status.arena.capacity_bytes == 1 << 20
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not process.path.exists()
        assert any("providing memory for blocks: 1 MiB of 1 MiB" in line for line in process.lines)

    def test_a_second_one_is_refused(self, serve):
        first = serve()
        first.wait_ready()
        second = serve()
        assert second.wait() == 3
        assert re.search(r"another kvstore daemon \(pid \d+\) serves", "\n".join(second.lines))
        with connected(first) as client:
            assert client.ask(Lookup(1, ENCODED, key(range(9)))) == Number(1, 0)

    def test_after_a_kill_the_next_one_starts_with_another_epoch(self, serve):
        first = serve()
        epoch = first.wait_ready()[3]
        with connected(first) as client:
            first.signal(signal.SIGKILL)
            assert client.receive() is None
        first.wait()
        assert first.path.exists()
        second = serve()
        assert second.wait_ready()[3] != epoch
        connected(second).close()

    def test_a_hangup_of_the_terminal_is_ignored(self, serve):
        process = serve()
        process.wait_ready()
        process.signal(signal.SIGHUP)
        with connected(process) as client:
            assert isinstance(client.ask(Lookup(1, ENCODED, key(range(9)))), Number)
        process.signal(signal.SIGINT)
        assert process.wait() == 0

    def test_without_descriptors_it_waits_until_some_are_free(self, serve):
        process = serve("--drain-timeout=0")
        process.wait_ready()
        with connected(process) as first, ExitStack() as others:
            limit = process.num_descriptors() + 10
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
            for _ in range(30):
                others.enter_context(Raw(process.path)).send(hello())
            until(lambda: any("cannot accept" in line for line in process.lines))
            assert isinstance(first.ask(Lookup(1, ENCODED, key(range(9)))), Number)
            others.close()
            connected(process).close()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0

    def test_wrong_settings_end_it_at_once(self, serve, tmp_path):
        process = serve("--dram=lots")
        assert process.wait() == 3
        assert "not a size" in process.lines[-1]
        busy = socket.create_server(("127.0.0.1", 0))
        with busy:
            process = serve("--tcp-port", str(busy.getsockname()[1]), KVSTORE_TOKEN=TOKEN)
            assert process.wait() == 3
        assert "cannot be had" in process.lines[-1]
        assert not process.path.exists()

    def test_more_memory_than_the_machine_has(self, serve):
        process = serve("--dram=100000TiB")
        assert process.wait() == 3
        told = re.search(r"([\d.]+) GiB .* are more than the ([\d.]+) GiB", process.lines[-1])
        assert told, process.lines
        assert float(told[1]) == 100_000 * 1024 > float(told[2]) > 0
        assert "give dram" in process.lines[-1]
        assert not process.path.exists()

    def test_tcp_clients_need_the_token(self, serve, tmp_path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        secret = tmp_path / "token"
        secret.write_text(TOKEN + "\n")
        secret.chmod(0o600)
        process = serve(f"--tcp-port={port}", f"--token-file={secret}", "--admin-port=0")
        ready = process.wait_ready()
        with Raw(("127.0.0.1", port)) as client:
            assert client.ask(hello(token="x" * 16)).error == "refused"
        with Raw(("127.0.0.1", port)) as client:
            welcome = client.ask(hello(token=TOKEN))
            number, device, inode = welcome.arena
            status = Path(f"/proc/{welcome.pid}/fd/{number}").stat()
            assert (status.st_dev, status.st_ino) == (device, inode)
        url = f"http://{ready[5]}:{ready[6]}"
        assert get(f"{url}/v1/status")[0] == 401
        assert get(f"{url}/v1/status", TOKEN)[0] == 200
        process.signal(signal.SIGTERM)
        process.wait()
        assert TOKEN not in "\n".join(process.lines)

    def test_the_status_of_one_with_tenants_from_a_file_shows_them(self, serve, tmp_path):
        file = tmp_path / "kvstore.toml"
        file.write_text('[tenants.acme]\nceiling = "512KiB"\nfloor = 65536\n')
        process = serve(f"--config={file}")
        process.wait_ready()
        result = CliRunner().invoke(build(()), ["status", f"--socket={process.path}"])
        assert result.exit_code == 0, result.stderr
        rows = [row.split() for row in result.stdout.splitlines()]
        assert ["acme", "0", "B", "64", "KiB", "512", "KiB"] in rows
        with connected(process) as client:
            assert len(client.ask(Status(1)).status.pool.tenants) == 2

    def test_the_admin_interface_shows_the_same_as_a_client_sees(self, serve):
        process = serve("--admin-port=0", "--node=here")
        ready = process.wait_ready()
        url = f"http://{ready[5]}:{ready[6]}"
        assert get(f"{url}/readyz")[0] == 200
        with connected(process) as client:
            client.put(range(8))
            told = client.ask(Status(1)).status
            document = json.loads(get(f"{url}/v1/status")[1])
        assert (document["node"], document["epoch"]) == ("here", told.epoch)
        assert document["num_clients"] == told.num_clients == 1
        config = json.loads(get(f"{url}/v1/config")[1])
        assert config["node"] == {"value": "here", "origin": "argument"}
        assert "kvstore_stored_blocks_total 2.0" in get(f"{url}/metrics")[1].decode()


def test_the_admin_interface_is_there_before_the_memory(tmp_path):
    settings, origins = load_with_origins(
        {"socket": tmp_path / "kv.sock", "dram": "1MiB", "admin_port": 0}, environment={}
    )
    daemon = Daemon(settings, origins)
    try:
        host, port = daemon.admin_address
        url = f"http://{host}:{port}"
        assert get(f"{url}/healthz")[0] == 200
        code, body = get(f"{url}/readyz")
        assert (code, b"starting" in body) == (503, True)
        assert get(f"{url}/v1/status")[0] == 503
    finally:
        daemon.close()


class TestStop:
    def test_what_is_held_may_be_ended_first(self, serve):
        process = serve("--drain-timeout=60", "--admin-port=0")
        ready = process.wait_ready()
        with connected(process) as client:
            client.put(range(8))
            lease = client.ask(Acquire(1, ENCODED, key(range(9))))
            process.signal(signal.SIGTERM)
            until(lambda: is_refused(process.path))
            assert client.ask(Acquire(2, ENCODED, key(range(9)))) == Held(2, 0, b"", b"", 0)
            assert client.ask(Reserve(3, ENCODED, key(range(16)))) == Held(3, 0, b"", b"", 4)
            assert client.ask(Status(4)).status.state == "draining"
            code, body = get(f"http://{ready[5]}:{ready[6]}/readyz")
            assert (code, b"draining" in body) == (503, True)
            assert process.running
            client.send(Release(lease.held))
            assert client.receive() is None
        assert process.wait() == 0
        assert not process.path.exists()

    def test_but_not_for_ever(self, serve):
        process = serve("--drain-timeout=0.2")
        process.wait_ready()
        with connected(process) as client:
            hold(client)
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            assert client.receive() is None

    def test_a_second_signal_ends_it_at_once(self, serve):
        process = serve("--drain-timeout=3600")
        process.wait_ready()
        with connected(process) as client:
            hold(client)
            process.signal(signal.SIGTERM)
            until(lambda: is_refused(process.path))
            process.signal(signal.SIGINT)
            assert process.wait() == 0
        assert not process.path.exists()
