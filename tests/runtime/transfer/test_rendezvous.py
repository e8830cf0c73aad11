"""Rendezvous: a text is there for who asks before and after it was published, and who waits in vain is told."""

import threading

import pytest

from autopar.errors import HostLost
from autopar.runtime.transfer.nccl import Rendezvous, fetch


def test_texts_are_given_whether_asked_for_before_or_after():
    texts = Rendezvous()
    texts.publish("after", b"\x00\xff" * 64)
    assert fetch(texts.address(), "after") == b"\x00\xff" * 64
    got: list[bytes] = []
    asking = threading.Thread(target=lambda: got.append(fetch(texts.address(), "before")))
    asking.start()
    texts.publish("another", b"no")
    texts.publish("before", b"yes")
    asking.join()
    texts.close()
    assert got == [b"yes"]


def test_who_waits_for_a_text_that_is_never_made_is_told():
    texts = Rendezvous(wait_s=0.01)
    with pytest.raises(HostLost, match=r"has not made '3->4' in time. All processes must load the same programs"):
        fetch(texts.address(), "3->4")
    texts.close()


def test_who_asks_a_process_that_is_gone_is_told():
    texts = Rendezvous()
    address = texts.address()
    texts.close()
    with pytest.raises(HostLost, match=rf"{address} was asked for '0->1' and did not answer"):
        fetch(address, "0->1")
