"""The collector of cycles is paused, and goes on as it was: after errors, too."""

import gc

import pytest

from autopar.progress import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), collector_paused():
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
