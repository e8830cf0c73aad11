"""Divide microbatches among lanes of unequal speed, so that the last one ends as early as can be.

    seconds of every lane for 0, 1, 2, ... microbatches  ->  how many each gets

A lane may take a while before its first microbatch, or less for the second than for the first; it only must not take
less for more of them. Within its memory a lane runs so many: its table ends there.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from autopar.errors import InvalidArgument, MemoryTooSmall


def minmax_split(seconds: Sequence[Sequence[float]], total: int) -> tuple[int, ...]:
    """Return how many of `total` microbatches each lane gets, for which the slowest lane takes the least seconds.

    `seconds[lane][n]` are those of n microbatches, from 0 to as many as the lane has room for. The least time T is the
    least of a table for which the lanes together end `total` within it; what is too many then is taken from whoever
    takes longest. Exact: with less than T they end fewer, and taking away makes no lane slower.

    Raises `InvalidArgument` for a lane that takes less for more, and `MemoryTooSmall` if there is no room for all.
    """
    for lane, table in enumerate(seconds):
        if not table or any(after < before for before, after in pairwise(table)):
            raise InvalidArgument(
                f"Lane {lane} takes {list(table)} seconds for 0, 1, 2, ... microbatches. Give times that do not fall."
            )
    room = sum(len(table) - 1 for table in seconds)
    if room < total:
        raise MemoryTooSmall(
            f"The lanes have room for {[len(table) - 1 for table in seconds]} microbatches, {room} in all, and there "
            f"are {total}. {total - room} more must fit: use more devices, or smaller microbatches."
        )
    times = sorted({each for table in seconds for each in table})
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        ended = sum(bisect_right(table, times[middle]) - 1 for table in seconds if table[0] <= times[middle])
        low, high = (low, middle) if ended >= total else (middle + 1, high)
    shares = [max(bisect_right(table, times[low]) - 1, 0) for table in seconds]
    while sum(shares) > total:
        slowest = max((lane for lane, share in enumerate(shares) if share), key=lambda n: seconds[n][shares[n]])
        shares[slowest] -= 1
    return tuple(shares)
