"""Checks which fragments are due after how many steps."""

from tfdml.strategies.keras_seam.local_updates.turns import Turns


def _started(fragments: int, sync_every: int) -> Turns:
    turns = Turns(fragments)
    turns.sync_every = sync_every
    turns.start()
    return turns


def _due_after(turns: Turns, steps: int) -> dict[int, list[int]]:
    """Returns the fragments that are due, by the number of steps, and ends their turns."""
    found = {}
    for step in range(1, steps + 1):
        turns.add(1)
        if turns.due:
            found[step] = turns.due
            turns.end(turns.due)
    return found


def test_fragments_alternate():
    assert _due_after(_started(1, 3), 7) == {3: [0], 6: [0]}
    assert _due_after(_started(2, 4), 8) == {2: [1], 4: [0], 6: [1], 8: [0]}
    assert _due_after(_started(3, 3), 4) == {1: [2], 2: [1], 3: [0], 4: [2]}


def test_steps_of_an_execution_are_counted_at_once():
    turns = _started(1, 3)
    turns.add(8)
    assert turns.due == turns.changed == [0]
    turns.end(turns.due)
    assert turns.due == turns.changed == []


def test_changed_fragments_are_those_with_steps_of_their_own():
    turns = _started(2, 4)
    assert turns.changed == [], "Steps that only shift a fragment's turn change nothing."
    turns.add(2)
    turns.end(turns.due)
    assert turns.changed == [0]
    assert turns.since == 0


def test_restored_turns_go_on():
    turns = _started(2, 4)
    _due_after(turns, 3)
    other = Turns(2)
    other.restore(turns.notes)
    assert _due_after(other, 5) == _due_after(turns, 5) == {1: [0], 3: [1], 5: [0]}
