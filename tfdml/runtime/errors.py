"""What a rank raises where its data, or another rank, is to blame."""


class OtherRankError(RuntimeError):
    """Another rank cannot go on, so this one cannot either; the other one says why."""


class DataError(RuntimeError):
    """This rank's data raised. TensorFlow's error for it may be one that a lost rank causes too."""
