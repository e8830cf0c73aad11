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


def test_what_was_made_inside_is_not_looked_at_again_soon() -> None:
    gc.unfreeze()  # what the suite froze
    try:
        with collector_paused():
            made: list[object] = [[]]
        assert any(each is made for each in gc.get_objects(generation=2))
    finally:
        gc.freeze()


def test_what_the_caller_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_paused():
        made: list[object] = [[]]
    assert 0 < 0.9 * frozen < gc.get_freeze_count()
    assert not any(each is made for each in gc.get_objects(generation=2))
