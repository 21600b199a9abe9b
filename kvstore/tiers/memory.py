"""Mapped memory that lives as long as somebody sees it: private, or shared by processes.

Python's own ``mmap`` keeps a second descriptor of the file it maps and holds the interpreter's lock in
``madvise``; here neither happens.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import weakref
from contextlib import suppress
from errno import EAGAIN, EINTR, EINVAL
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Access = Literal["read", "write"]

HUGE_PAGE_BYTES = 2 << 20
"""Addresses are aligned to this: a huge page can only be mapped where address and offset agree."""
PIECE_BYTES = 64 << 20
"""Memory is populated in pieces of this size, some 30 ms each."""

_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_DONTDUMP = 16
_MADV_POPULATE = {"read": 22, "write": 23}
"""Linux 5.14; not named by Python 3.11."""
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """``num_bytes`` of address space with memory behind it.

    It is unmapped when neither the region nor an array over it is left. Core dumps leave it out.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        descriptor: int = -1,
        access: Access = "write",
        alignment: int = HUGE_PAGE_BYTES,
    ) -> None:
        """Map private zeros, or the file ``descriptor`` to share it; the caller keeps the descriptor.

        Args:
            num_bytes: size, in whole pages.
            descriptor: an open file of at least that size; -1 for private memory.
            access: what the memory may be used for.
            alignment: the address is a multiple of it: a power of two, at least a page.

        Raises:
            OSError: the system refuses.
        """
        self.num_bytes = num_bytes
        self._access = access
        self._is_shared = descriptor >= 0
        shared = mmap.MAP_SHARED if self._is_shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if access == "write" else 0)
        self.address = _reserve(num_bytes, alignment)
        weakref.finalize(self, _libc.munmap, self.address, num_bytes).atexit = False
        _map(self.address, num_bytes, protection, shared | _MAP_FIXED, descriptor)
        with suppress(OSError):
            self.advise(_MADV_DONTDUMP)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.num_bytes,),
            "data": (self.address, self._access == "read"),
        }

    def array(self) -> NDArray[np.uint8]:
        """Return the memory, uint8 ``[num_bytes]``; writeable if the region is."""
        return np.asarray(self)

    def advise(self, advice: int) -> None:
        """Call ``madvise`` for the whole region. Raises OSError."""
        _advise(self.address, self.num_bytes, advice)

    def populate(self) -> Iterator[int]:
        """Have the kernel provide every page for the region's access: nothing faults afterwards.

        Yields:
            Bytes done, after each ``PIECE_BYTES``.

        Raises:
            OSError: there is no more memory.
        """
        for start in range(0, self.num_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, self.num_bytes)
            try:
                _advise(self.address + start, stop - start, _MADV_POPULATE[self._access])
            except OSError as error:
                if error.errno != EINVAL:
                    raise
                self._touch(start, stop)
            yield stop

    def replace_by_zeros(self) -> None:
        """Put private zeros, read- and writeable, in the place of what is mapped.

        The memory that was there is given back, and whoever still looks at the region sees zeros.

        Raises:
            OSError: not even address space is left.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            _map(self.address, self.num_bytes, protection, flags, -1)
        except OSError:  # a system that promises no more than it has; files are taken page by page
            descriptor = os.memfd_create("kvstore-void", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, self.num_bytes)
                shared = mmap.MAP_SHARED | _MAP_NORESERVE | _MAP_FIXED
                _map(self.address, self.num_bytes, protection, shared, descriptor)
            finally:
                os.close(descriptor)

    def _touch(self, start: int, stop: int) -> None:
        """Do what ``populate`` does on older kernels.

        Reading gets a page of shared memory, in which others may be writing; private memory must be
        written to.
        """
        pages = self.array()[start : stop : mmap.PAGESIZE]
        if self._is_shared:
            pages.max()
        else:
            pages |= 0


def cuda_is_present() -> bool:
    """Whether this process uses torch and has a CUDA device, which copies faster from pinned memory."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def cuda_register(address: int, num_bytes: int, flags: int) -> bool:
    """Page-lock memory for CUDA (``cudaHostRegister``).

    Returns:
        Whether it is. A refusal is logged and leaves no error behind for later calls.
    """
    import torch

    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, flags))
    if code == 0:
        return True
    logger.warning("CUDA does not page-lock %d bytes of host memory: error %d", num_bytes, code)
    with suppress(
        RuntimeError
    ):  # the runtime reports its last error once more, with the next kernel
        torch.ones(1, device="cuda")
    return False


def cuda_unregister(address: int) -> None:
    """Undo :func:`cuda_register`."""
    import torch

    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


def _reserve(num_bytes: int, alignment: int) -> int:
    """Reserve address space for ``num_bytes`` at a multiple of ``alignment``."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _map(None, num_bytes + alignment, 0, flags, -1)
    address = -(-start // alignment) * alignment
    before, behind = address - start, start + alignment - address
    if before:
        _libc.munmap(start, before)
    if behind:
        _libc.munmap(address + num_bytes, behind)
    return address


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if mapped == _MAP_FAILED:
        _raise_errno()
    return int(mapped)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    while _libc.madvise(address, num_bytes, advice):
        if ctypes.get_errno() not in {EAGAIN, EINTR}:
            _raise_errno()


def _raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
