"""Give memory that requests have freed back to the system.

glibc keeps freed memory for the thread that had it: a thousand large schemas left a server with 365 MB that nothing
used. Other C libraries are left alone.
"""

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Any

MAX_ARENAS = 2
GROWTH = 1.03  # of the resident memory, after which freed memory is looked for
SECONDS = 5.0  # between two looks
_M_ARENA_MAX = -8  # mallopt(3)


def limit_arenas() -> None:
    """Have threads share what they free. Acts on threads that start later."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, MAX_ARENAS)


async def give_back(seconds: float = SECONDS) -> None:
    """Give freed memory back whenever the process has grown, until cancelled."""
    library = _glibc()
    if library is None:
        return
    level = resident_bytes()
    while True:
        await asyncio.sleep(seconds)
        if resident_bytes() > GROWTH * level:
            await asyncio.to_thread(library.malloc_trim, 0)
            level = resident_bytes()


def resident_bytes() -> int:
    """Return the resident memory of this process. Linux only."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def _glibc() -> Any:
    """Return the C library if it is glibc, else None."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") else None
