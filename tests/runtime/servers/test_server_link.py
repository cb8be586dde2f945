"""Checks what the chief knows of lost servers."""

from tests.runtime.servers import link_cases as cases


def test_a_server_that_is_back_before_its_loss_was_noticed_is_lost(ranks):
    """Its variables are."""
    (found,) = ranks(1).run(cases.started_again_unnoticed)
    assert found == {"first": [], "again": [0], "missing": [], "returned": [0], "then": []}
