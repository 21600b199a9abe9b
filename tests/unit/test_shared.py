"""Shared memory: what it refuses, what clients can do with it, and that all of it is given back."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.assembly import build_shared
from kvstore.config import load_settings
from kvstore.errors import ConfigError, UsageError
from kvstore.host import reserved_huge_pages
from kvstore.namespace import KVLayout, Namespace
from kvstore.tiers import memory, shared
from kvstore.tiers.memory import Region
from kvstore.tiers.shared import ClientMapping, SharedDramStore, huge_page_bytes

MIB = 1 << 20
SIZE = 3 * MIB + 4096


@pytest.fixture
def store():
    store = SharedDramStore(SIZE, time.monotonic, prefault=True)
    yield store
    store.close()


def attach(store, access="read"):
    descriptor = store.open_read_only() if access == "read" else os.dup(store.descriptor)
    return ClientMapping(descriptor, store.capacity_bytes, access)


def memfd_links():
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    return [link for link in links if "memfd:kvstore" in link]


def mappings_of(inode):
    """Mappings of this process that show the file ``inode``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "kvstore-dram" in line and line.split()[4] == str(inode)]


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return True
    return False


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes(address):
    """How much of the mapping that begins at ``address`` this process has mapped."""
    text = Path("/proc/self/smaps").read_text().split(f"{address:x}-")[1]
    return int(text.split("Rss:")[1].split()[0]) << 10


# ------------------------------------------------------------------------------- the daemon's side


def test_the_size_is_sealed(store):
    for size in (0, SIZE - 4096, SIZE + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(store.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(store.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_descriptor_is_not_inherited_and_no_other_is_kept(store):
    assert not os.get_inheritable(store.descriptor)
    assert len(memfd_links()) == 1
    assert os.fstat(store.descriptor).st_mode & 0o777 == 0o600
    mapping = attach(store)
    assert len(memfd_links()) == 1
    mapping.detach()
    store.close()
    assert store.descriptor == -1
    assert memfd_links() == []


def test_closing_gives_everything_back():
    store = SharedDramStore(SIZE, time.monotonic, prefault=True)
    inode, address = store.identity[2], store.buffer.ctypes.data
    assert mappings_of(inode)
    view = store.buffer[4096:8192]
    view[:] = 5
    store.close()
    store.close()
    assert set(view.tolist()) == {5}
    del view
    assert not mappings_of(inode)
    assert not is_mapped(address)


def test_a_read_only_descriptor_can_only_be_read(store):
    descriptor = store.open_read_only()
    assert descriptor != store.descriptor
    assert not os.get_inheritable(descriptor)
    with pytest.raises(PermissionError):
        Region(SIZE, descriptor=descriptor, access="write")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    region = Region(SIZE, descriptor=descriptor, access="read")
    os.close(descriptor)
    mprotect = memory._libc.mprotect
    mprotect.argtypes = memory._libc.madvise.argtypes
    assert mprotect(region.address, SIZE, 3) == -1
    store.buffer[7] = 9
    assert region.array()[7] == 9
    with pytest.raises(ValueError, match="read-only"):
        region.array()[7] = 1


def test_prefaulting_provides_every_page_and_tells_how_far_it_is(monkeypatch):
    monkeypatch.setattr(memory, "PIECE_BYTES", MIB)
    ticks = iter([10.0, 12.5])
    done = []
    store = SharedDramStore(SIZE, lambda: next(ticks), prefault=True, on_progress=done.append)
    assert done == [MIB, 2 * MIB, 3 * MIB, SIZE]
    assert os.fstat(store.descriptor).st_blocks * 512 == SIZE
    assert resident_bytes(store.buffer.ctypes.data) == SIZE
    stats = store.arena_stats()
    assert (stats.capacity_bytes, stats.prefault_s) == (SIZE, 2.5)
    store.close()


def test_without_prefaulting_nothing_is_provided():
    store = SharedDramStore(SIZE, time.monotonic)
    assert os.fstat(store.descriptor).st_blocks == 0
    stats = store.arena_stats()
    assert (stats.prefault_s, stats.huge_page_bytes) == (0, 0)
    store.close()


def test_other_threads_run_while_memory_is_provided():
    """The switch interval is so long that another thread runs only if the call lets it."""
    count, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)

    before_interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=tick, name="kvstore-tick")
    thread.start()
    try:
        for _ in range(50):
            pieces = Region(32 * MIB).populate()
            before = count[0]
            next(pieces)
            if count[0] > before:
                break
        else:
            pytest.fail("no other thread ran during 50 calls")
    finally:
        stop.set()
        sys.setswitchinterval(before_interval)
        thread.join()


def test_memory_that_runs_out_is_a_refusal_with_numbers(monkeypatch):
    monkeypatch.setattr(memory, "PIECE_BYTES", MIB)
    real, calls = memory._advise, []

    def advise(address, num_bytes, advice):
        calls.append(advice)
        if calls.count(23) == 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        real(address, num_bytes, advice)

    monkeypatch.setattr(memory, "_advise", advise)
    with pytest.raises(ConfigError) as caught:
        SharedDramStore(SIZE, time.monotonic, prefault=True)
    for words in (f"dram={SIZE}", f"after {2 * MIB} bytes", "Cannot allocate memory"):
        assert words in str(caught.value)
    assert memfd_links() == []


@pytest.mark.parametrize("error", [BrokenPipeError, KeyboardInterrupt])
def test_what_stops_the_progress_report_stops_all(error):
    def report(done_bytes):
        raise error

    with pytest.raises(error):
        SharedDramStore(SIZE, time.monotonic, prefault=True, on_progress=report)
    assert memfd_links() == []


def test_a_kernel_that_cannot_populate_has_its_pages_touched(monkeypatch):
    real = memory._advise

    def advise(address, num_bytes, advice):
        if advice in {22, 23}:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(address, num_bytes, advice)

    monkeypatch.setattr(memory, "_advise", advise)
    store = SharedDramStore(SIZE, time.monotonic, prefault=True)
    assert os.fstat(store.descriptor).st_blocks * 512 == SIZE
    store.buffer[:] = 3
    list(Region(SIZE, descriptor=store.descriptor).populate())
    assert (store.buffer == 3).all()
    region = Region(SIZE, descriptor=store.descriptor, access="read")
    list(region.populate())
    assert resident_bytes(region.address) == SIZE
    store.close()


def test_touching_writes_nothing_where_others_may_be_writing(store, monkeypatch):
    """Reading a byte and writing it back would undo what another process wrote in between."""
    real, array = memory._advise, Region.array

    def advise(address, num_bytes, advice):
        if advice in {22, 23}:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(address, num_bytes, advice)

    def read_only(region):
        view = array(region)
        view.flags.writeable = False
        return view

    monkeypatch.setattr(memory, "_advise", advise)
    private = Region(SIZE)
    list(private.populate())
    assert resident_bytes(private.address) == SIZE
    monkeypatch.setattr(Region, "array", read_only)
    region = Region(SIZE, descriptor=store.descriptor)
    list(region.populate())
    assert resident_bytes(region.address) == SIZE


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_limits_of_the_process_are_refusals(limit):
    script = (
        "import resource, time\n"
        "from kvstore.errors import ConfigError\n"
        "from kvstore.tiers.shared import SharedDramStore\n"
        f"resource.setrlimit(resource.{limit}, (2 << 30, 2 << 30))\n"
        "try: SharedDramStore(4 << 30, time.monotonic)\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(f"dram={4 << 30} bytes cannot be had")
    assert "ulimit" in done.stdout


# ------------------------------------------------------------------------------------- huge pages

SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:01 1039 /memfd:kvstore-dram (deleted)
Size:               4096 kB
ShmemPmdMapped:     2048 kB
Shared_Hugetlb:        0 kB
7f0000400000-7f0000600000 rw-s 00400000 00:01 1039 /memfd:kvstore-dram (deleted)
ShmemPmdMapped:        0 kB
Private_Hugetlb:    2048 kB
7f0000600000-7f0000800000 rw-s 00000000 00:01 1040 /memfd:kvstore-dram (deleted)
ShmemPmdMapped:     2048 kB
"""


def test_huge_pages_are_counted_for_the_mapping_alone():
    start = 0x7F0000000000
    assert huge_page_bytes(SMAPS, start, 6 * MIB) == 4 * MIB
    assert huge_page_bytes(SMAPS, start + 6 * MIB, 2 * MIB) == 2 * MIB
    assert huge_page_bytes(SMAPS, start + 8 * MIB, 2 * MIB) == 0
    assert huge_page_bytes("", start, 2 * MIB) == 0


def test_the_statistics_tell_whether_transparent_huge_pages_were_given():
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    store = SharedDramStore(8 * MIB, time.monotonic, huge_pages="transparent", prefault=True)
    given = store.arena_stats().huge_page_bytes
    if "[advise]" in setting:
        assert given == 8 * MIB
        mapping = attach(store)
        assert mapping.buffer.ctypes.data % (2 * MIB) == 0
        mapping.detach()
    elif "[never]" in setting or "[deny]" in setting:
        assert given == 0
    store.close()


@pytest.mark.parametrize(
    ("pages", "capacity", "says"),
    [
        (
            (2 * MIB, 3),
            8 * MIB,
            r"needs 4 huge pages of 2097152 bytes, and 3 are free.*nr_hugepages",
        ),
        ((2 * MIB, 3), 2 * MIB - 4096, "less than one huge page"),
        ((0, 0), 8 * MIB, "this kernel has none"),
    ],
)
def test_too_few_reserved_huge_pages(monkeypatch, pages, capacity, says):
    monkeypatch.setattr(shared, "reserved_huge_pages", lambda root: pages)
    with pytest.raises(ConfigError, match=says):
        SharedDramStore(capacity, time.monotonic, huge_pages="reserved")


def test_reserved_huge_pages():
    page_bytes, free = reserved_huge_pages(Path("/"))
    if free < 2:
        pytest.skip("fewer than 2 reserved huge pages are free")
    store = SharedDramStore(
        2 * page_bytes + 4096, time.monotonic, huge_pages="reserved", prefault=True
    )
    assert store.capacity_bytes == 2 * page_bytes
    assert store.arena_stats().huge_page_bytes == 2 * page_bytes
    mapping = attach(store, "write")
    mapping.prefault()
    mapping.buffer[:] = 3
    assert (store.buffer == 3).all()
    mapping.detach()
    assert not mapping.buffer.any()
    store.close()
    assert reserved_huge_pages(Path("/")) == (page_bytes, free)


# ------------------------------------------------------------------------------- the client's side


def test_what_one_side_writes_the_other_reads(store):
    reader, writer = attach(store), attach(store, "write")
    assert reader.buffer.shape == (SIZE,)
    assert reader.buffer.dtype == np.uint8
    writer.buffer[4096:8192] = 7
    assert (store.buffer[4096:8192] == 7).all()
    store.buffer[4096] = 8
    assert reader.buffer[4096] == 8
    assert not reader.buffer.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        reader.buffer.flags.writeable = True
    for mapping in (reader, writer):
        mapping.detach()


def test_memory_that_is_not_as_promised_is_refused_and_closed(store):
    with pytest.raises(UsageError, match=f"has {SIZE} bytes, and it said {SIZE + 4096}"):
        ClientMapping(store.open_read_only(), SIZE + 4096, "read")
    with pytest.raises(PermissionError):
        ClientMapping(store.open_read_only(), SIZE, "write")
    unsealed = os.memfd_create("kvstore-dram", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    with pytest.raises(UsageError, match="sealed"):
        ClientMapping(unsealed, SIZE, "read")
    assert len(memfd_links()) == 1


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "arena"
    file.write_bytes(bytes(4096))
    descriptor = os.open(file, os.O_RDONLY)
    with pytest.raises(UsageError, match="no memfd"):
        ClientMapping(descriptor, 4096, "read")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_arrays_outlive_the_daemon():
    script = (
        "import time, sys\n"
        "from kvstore.tiers.shared import SharedDramStore\n"
        f"store = SharedDramStore({SIZE}, time.monotonic)\n"
        "store.buffer[:] = 6\n"
        "print(*store.identity, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemon:
        number, device, inode = map(int, daemon.stdout.readline().split())
        descriptor = os.open(f"/proc/{daemon.pid}/fd/{number}", os.O_RDWR)
        stat = os.fstat(descriptor)
        assert (stat.st_dev, stat.st_ino) == (device, inode)
        mapping = ClientMapping(descriptor, SIZE, "write")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
    assert (mapping.buffer == 6).all()
    mapping.buffer[:] = 7
    assert mappings_of(inode)
    mapping.detach()
    assert not mappings_of(inode)
    assert not mapping.buffer.any()


def test_detaching_leaves_zeros_and_hurts_nobody(store):
    store.buffer[:] = 5
    writer, bystander = attach(store, "write"), attach(store)
    inode, address = store.identity[2], writer.buffer.ctypes.data
    view = writer.buffer[4096:12288].reshape(2, 4096)
    assert len(mappings_of(inode)) == 3
    writer.detach()
    writer.detach()
    assert len(mappings_of(inode)) == 2
    assert not view.any()
    assert resident_bytes(address) <= 12288
    view[:] = 9
    writer.buffer[0] = 9
    assert (store.buffer == 5).all()
    assert (bystander.buffer == 5).all()
    bystander.detach()
    del writer
    assert view[0, 0] == 9
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


def test_a_read_only_mapping_stays_read_only_for_numpy(store):
    store.buffer[:] = 5
    mapping = attach(store)
    mapping.detach()
    assert not mapping.buffer.any()
    with pytest.raises(ValueError, match="read-only"):
        mapping.buffer[0] = 1


def test_a_reader_in_another_thread_sees_zeros_and_goes_on(store):
    store.buffer[:] = 5
    mapping = attach(store)
    began, seen = threading.Event(), []

    def read():
        while True:
            copy = mapping.buffer.copy()
            began.set()
            if not copy.any():
                seen.append(True)
                return

    thread = threading.Thread(target=read, name="kvstore-reader")
    thread.start()
    assert began.wait(30)
    mapping.detach()
    thread.join(30)
    assert seen == [True]


def test_many_threads_may_detach_at_once(store):
    mapping = attach(store)
    mapping.prefault()
    barrier, early = threading.Barrier(4), []

    def detach():
        barrier.wait()
        mapping.detach()
        if mappings_of(store.identity[2])[1:]:
            early.append("returned before it was detached")

    threads = [threading.Thread(target=detach, name="kvstore-detach") for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert early == []


def test_attaching_and_detaching_leaves_nothing():
    def cycle():
        store = SharedDramStore(SIZE, time.monotonic, prefault=True)
        mapping = attach(store, "write")
        mapping.prefault()
        mapping.buffer[:] = 1
        store.close()
        mapping.detach()

    for _ in range(5):
        cycle()
    lines, rss = len(Path("/proc/self/maps").read_text().splitlines()), rss_bytes()
    for _ in range(100):
        cycle()
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= lines + 3
    assert rss_bytes() < rss + 20 * SIZE


def test_zeros_can_be_written_where_the_system_promises_no_memory(store, monkeypatch):
    real = memory._map

    def no_writeable_memory(address, num_bytes, protection, flags, descriptor):
        if flags & mmap.MAP_PRIVATE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(address, num_bytes, protection, flags, descriptor)

    store.buffer[:] = 5
    mapping = attach(store, "write")
    monkeypatch.setattr(memory, "_map", no_writeable_memory)
    mapping.detach()
    assert not mapping.buffer.any()
    mapping.buffer[:] = 7
    assert (store.buffer == 5).all()


# ------------------------------------------------------------------------------ prefault and pin


def join_prefault(mapping):
    mapping._prefaulting.join(30)
    assert not mapping._prefaulting.is_alive()


def test_a_client_maps_ahead_what_the_daemon_has_provided(store):
    mapping = attach(store)
    address = mapping.buffer.ctypes.data
    assert resident_bytes(address) == 0
    mapping.prefault()
    mapping.prefault()
    join_prefault(mapping)
    assert resident_bytes(address) == SIZE
    mapping.detach()


def test_a_client_provides_no_memory_for_the_daemon():
    store = SharedDramStore(SIZE, time.monotonic)
    mapping = attach(store)
    mapping.prefault()
    assert mapping._prefaulting is None
    assert os.fstat(store.descriptor).st_blocks == 0
    mapping.detach()
    store.close()


def test_detaching_ends_mapping_ahead(store, monkeypatch):
    began = threading.Event()

    def endless(region):
        try:
            while True:
                began.set()
                yield 0
        finally:
            time.sleep(0.05)  # who does not wait for the thread returns before this

    monkeypatch.setattr(Region, "populate", endless)
    mapping = attach(store)
    mapping.prefault()
    assert began.wait(30)
    mapping.detach()
    assert not mapping._prefaulting.is_alive()
    mapping.prefault()


def test_a_client_that_cannot_map_ahead_goes_on(store, monkeypatch, caplog):
    def failing(region):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
        yield 0

    monkeypatch.setattr(Region, "populate", failing)
    mapping = attach(store)
    mapping.prefault()
    join_prefault(mapping)
    assert "Cannot allocate memory" in caplog.text
    mapping.detach()


def test_without_a_thread_for_it_the_memory_is_given_back_all_the_same(store, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    store.buffer[:] = 5
    mapping = attach(store)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            mapping.prefault()
    mapping.prefault()
    join_prefault(mapping)
    mapping.detach()
    assert not mapping.buffer.any()


class FakeRuntime:
    """The CUDA runtime; ``seen`` are the first bytes of the memory at the moment of each call."""

    def __init__(self, code=0, unregister_code=0):
        self.code, self.unregister_code = code, unregister_code
        self.calls, self.seen, self.buffer = [], [], None

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.calls.append(("register", address, num_bytes, flags))
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(("unregister", address))
        self.seen.append(int(self.buffer[0]))
        return self.unregister_code

    def install(self, monkeypatch):
        def forget_error(*_, **__):
            self.calls.append(("forget error",))
            raise RuntimeError

        def check_error(code):
            if code:
                raise RuntimeError(f"CUDA error {code}")

        cuda = SimpleNamespace(
            cudart=lambda: self, check_error=check_error, is_available=lambda: True
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, ones=forget_error))


@pytest.mark.parametrize(("access", "flags"), [("read", 8), ("write", 0)])
def test_memory_is_unpinned_before_it_is_given_back(store, monkeypatch, access, flags):
    runtime = FakeRuntime()
    runtime.install(monkeypatch)
    store.buffer[:] = 5
    mapping = attach(store, access)
    runtime.buffer, address = mapping.buffer, mapping.buffer.ctypes.data
    assert mapping.pin()
    assert mapping.pin()
    mapping.detach()
    mapping.detach()
    assert runtime.calls == [("register", address, SIZE, flags), ("unregister", address)]
    assert runtime.seen == [5]
    assert not mapping.pin()


def test_a_device_that_does_not_let_go_keeps_nothing_mapped(store, monkeypatch, caplog):
    """Any earlier error of the device is reported once more at that moment."""
    runtime = FakeRuntime(unregister_code=700)
    runtime.install(monkeypatch)
    store.buffer[:] = 5
    mapping = attach(store, "write")
    runtime.buffer = mapping.buffer
    assert mapping.pin()
    mapping.detach()
    assert runtime.seen == [5]
    assert not mapping.buffer.any()
    assert len(mappings_of(store.identity[2])) == 1
    assert "CUDA error 700" in caplog.text


def test_a_device_that_cannot_pin_is_no_failure(store, monkeypatch, caplog):
    runtime = FakeRuntime(801)
    runtime.install(monkeypatch)
    mapping = attach(store)
    assert not mapping.pin()
    mapping.detach()
    assert [call[0] for call in runtime.calls] == ["register", "forget error"]
    assert "801" in caplog.text


def test_nothing_is_pinned_without_torch(store, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    mapping = attach(store)
    assert not mapping.pin()
    mapping.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("access", ["read", "write"])
def test_pinned_on_a_device(store, access):
    torch = pytest.importorskip("torch")
    mapping = attach(store, access)
    if mapping.pin():
        # A second registration of the same memory is refused, and must leave no error behind.
        assert not memory.cuda_register(mapping.buffer.ctypes.data, SIZE, 0)
    torch.ones(4, device="cuda").sum().item()
    if access == "write":
        store.buffer[:] = 5
        on_device = torch.from_numpy(mapping.buffer).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert bool((on_device == 5).all())
    mapping.detach()
    torch.ones(4, device="cuda").sum().item()


# --------------------------------------------------------------------------------- the whole pool


def settings(**arguments):
    return load_settings({"dram": "1MiB", **arguments}, {})


def test_a_daemons_pool_keeps_its_blocks_where_clients_see_them():
    done = []
    pool, store = build_shared(settings(dram="1025KiB"), on_progress=done.append)
    with pool:
        assert pool.tier_names == ("dram",)
        assert done == [store.capacity_bytes] == [1 << 20]
        namespace = Namespace(b"w", KVLayout(1, 1, 8, "float32"))
        mapping = attach(store, "write")
        reservation = pool.reserve(namespace, range(32))
        for number, offset in enumerate(reservation.offsets.tolist()):
            mapping.buffer[offset : offset + namespace.layout.block_bytes] = number + 1
        assert pool.commit(reservation) == 2
        pool.drain()
        lease = pool.acquire(namespace, range(33))
        assert pool.verify(lease) == 2
        assert [int(pool.buffer("dram")[offset]) for offset in lease.offsets.tolist()] == [1, 2]
        mapping.buffer[lease.offsets[1]] = 9
        assert pool.verify(lease) == 1
        pool.release(lease)
        mapping.detach()
    assert memfd_links() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"gpu": "1MiB"}, "gpu tier, which lives in the engine's process: set gpu=0"),
        ({"dram": 0}, "dram is 0"),
        ({"dram": 8}, "smaller than one page"),
        (
            {"dram": "7TiB"},
            r"7168\.0 GiB .* more than the .* may use now: .* has .* GiB, .* doctor",
        ),
        ({"dram": "7TiB", "huge_pages": "reserved"}, "nr_hugepages|this kernel has none"),
    ],
)
def test_a_daemons_pool_that_cannot_be_built(arguments, says):
    with pytest.raises(ConfigError, match=says):
        build_shared(settings(**arguments))
    assert memfd_links() == []
