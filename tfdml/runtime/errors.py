"""What a rank raises where another one is to blame."""


class OtherRankError(RuntimeError):
    """Another rank cannot go on, so this one cannot either; the other one says why."""
