"""Keep what a program's callbacks raise until its devices are through, then raise it to who called the step.

A callback that raises ends the work of its device, while the others wait for that device in their next collective. So
here it does not raise: its results are zeros, every device goes on, and the call fails in place of giving results.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

FlatCallback = Callable[..., Sequence[Any]]


class CallbackErrors:
    """Exceptions that callbacks of one program raised in the call under way; a context in which that call runs.

    The context is left when the effects of the call are there. It raises `jax.errors.JaxRuntimeError`, as a callback
    does under `jax.jit`, with the first error as its cause. One call at a time is inside, so that errors are its own.
    """

    def __init__(self) -> None:
        self._one_call = threading.RLock()
        self._first: BaseException | None = None

    def keep(self, callback: FlatCallback, results: Sequence[Any]) -> FlatCallback:
        """Return the callback as one that never raises; `results` have the shapes and dtypes that it declares."""

        def call(*args: Any) -> Sequence[Any]:
            try:
                return _declared(callback(*args), results)
            except BaseException as error:
                self._first = self._first or error
                return [np.zeros(result.shape, result.dtype) for result in results]

        return call

    def __enter__(self) -> None:
        self._one_call.acquire()

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        first, self._first = self._first, None
        self._one_call.release()
        if first is not None and error is None:
            text = "".join(traceback.format_exception(first))
            raise jax.errors.JaxRuntimeError(f"INTERNAL: a callback of the step raised: {text}") from first


def _declared(values: Sequence[Any], results: Sequence[Any]) -> Sequence[Any]:
    """Return the results of a callback as arrays; other ones than it declares are an error, as in JAX."""
    if not results:
        return ()
    arrays = [np.asarray(value) for value in values]
    found = [(array.shape, jax.dtypes.canonicalize_dtype(array.dtype)) for array in arrays]
    wanted = [(tuple(result.shape), result.dtype) for result in results]
    if found != wanted:
        raise RuntimeError(f"The callback returned {_listed(found)}, but declares {_listed(wanted)}.")
    return arrays


def _listed(types: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in types) or "nothing"
