"""Checks what ranks need to meet without `horovodrun`; the ranks of all other tests meet so."""

import pytest

from tfdml.runtime.launch.horovod_rendezvous import interface_of


def test_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ValueError, match="`address` must be one of this machine.*'203.0.113.7'"):
        interface_of("203.0.113.7")
