"""The best epoch so far, by a metric in the logs."""


class BestEpoch:
    """Decides whether an epoch is better than the best one before.

    Args:
        name: The metric's name in the logs; None for no best epoch.
        mode: "min" or "max"; "auto" takes "min" for names with "loss" or "error".
    """

    def __init__(self, name: str | None, mode: str):
        self._name = name
        if mode == "auto" and name is not None:
            mode = "min" if "loss" in name or "error" in name else "max"
        self._sign = -1.0 if mode == "min" else 1.0

    def value(self, metrics: dict[str, float], before: float | None) -> float | None:
        """Returns an epoch's value if it is the first or better than `before`, else None.

        Raises:
            ValueError: If the metrics do not have the name.
        """
        if self._name is None:
            return None
        if self._name not in metrics:
            raise ValueError(
                f"`keep_best` must be a name in the logs, {sorted(metrics)}. Received: "
                f"keep_best={self._name!r}."
            )
        value = metrics[self._name]
        return value if before is None or self._sign * value > self._sign * before else None
