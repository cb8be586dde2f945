"""Heartbeats of this process: what its main thread is doing now."""

from tfdml.runtime.guard.activity import Activity


class Heartbeats:
    """Maker of this process's heartbeats, which the guard sends.

    Args:
        activity: Current activity of the main thread.
    """

    def __init__(self, activity: Activity):
        self._activity = activity
        self._sent_collectives = 0

    def next(self) -> dict:
        """Returns a message with the activity now, and the graphs' collectives if there are new."""
        activity = self._activity
        # Read in this order: a graph reported as finished is then complete, and whatever is noted
        # during the copy is sent with the next heartbeat.
        tracing, noted = activity.tracing, activity.collectives_noted
        collectives = None
        if noted != self._sent_collectives:
            collectives = {step: dict(found) for step, found in list(activity.collectives.items())}
            self._sent_collectives = noted
        return {
            "kind": "beat",
            "activity": activity.describe(),
            "call": activity.call,
            "calls": activity.calls,
            "waits_for": activity.waits_for,
            "progress": activity.progress,
            "tracing": tracing,
            "collectives": collectives,
        }
