"""Choice of the reader of a model's step times, by its strategy."""

import keras

from tfdml.callbacks.performance.job_times import JobTimes
from tfdml.callbacks.performance.server_times import ServerTimes
from tfdml.strategies.parameter_server.strategy import ParameterServerStrategy
from tfdml.strategies.replicas.extended import ReplicaExtended


def make_reader(model: keras.Model) -> JobTimes | ServerTimes | None:
    """Returns the reader of a model's step times; None if its steps are another strategy's.

    Args:
        model: The model. Its next train step is traced again if it has no clock yet.
    """
    strategy = model.distribute_strategy
    if isinstance(strategy, ParameterServerStrategy):
        return ServerTimes(strategy)
    if isinstance(strategy.extended, ReplicaExtended) or strategy.num_replicas_in_sync == 1:
        return JobTimes(model)
    return None
