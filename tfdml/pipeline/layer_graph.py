"""The calls of a functional model's layers, and the tensors between them."""

from typing import Any

import keras


class LayerGraph:
    """Calls of a functional or Sequential model's layers, in an order in which they can run.

    The order is that in which Keras runs them. A nested model is one call.

    Args:
        model: A functional or a built Sequential model.

    Attributes:
        function: The functional model that has the graph; of a Sequential one, that inside of it.
        calls: The calls, as nodes of Keras: `operation`, `arguments` and `outputs` of each. Input
            layers are not among them.
        names: The name of each call's operation; a layer that is called twice is there twice.
        inputs: The model's inputs, symbolic tensors, in flat order.
        outputs: Its outputs.

    Raises:
        ValueError: If the model has no graph, or does not run it.
    """

    def __init__(self, model: keras.Model):
        self.function = function_of(model)
        by_depth = self.function._nodes_by_depth
        self.calls = [
            node
            for depth in sorted(by_depth, reverse=True)
            for node in by_depth[depth]
            if node.operation and not node.is_input
        ]
        self.names: list[str] = [call.operation.name for call in self.calls]
        self.inputs: list[keras.KerasTensor] = list(self.function.inputs)
        self.outputs: list[keras.KerasTensor] = list(self.function.outputs)
        self._made = _numbered(self.calls, self.inputs)
        self._last_uses = self._find_last_uses()

    def crossing(self, position: int) -> list[keras.KerasTensor]:
        """Returns the tensors that have to be there before a call, in the order of their making.

        They are the model's inputs and results of earlier calls that this or a later call uses, or
        that the model returns; each once.

        Args:
            position: Number of the call: 0 for the inputs that are used, `len(calls)` for the
                outputs.
        """
        return [
            tensor
            for key, (tensor, call) in self._made.items()
            if call < position and self._last_uses.get(key, -1) >= position
        ]

    def maker(self, tensor: keras.KerasTensor) -> int:
        """Returns the number of the call that makes a tensor; -1 for an input of the model."""
        return self._made[id(tensor)][1]

    def variables(self, begin: int, end: int) -> list[keras.Variable]:
        """Returns the variables of the layers that are called in `calls[begin:end]`, each once."""
        found = [v for call in self.calls[begin:end] for v in variables_of(call)]
        return list({id(variable): variable for variable in found}.values())

    def owners(self) -> dict[int, int]:
        """Returns for the id of each variable the number of the first call that uses it."""
        first: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            for variable in variables_of(call):
                first.setdefault(id(variable), number)
        return first

    def _find_last_uses(self) -> dict[int, int]:
        """Returns for each used tensor the number of the last call that uses it.

        For the model's outputs it is the number of calls.
        """
        last: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            for tensor in call.input_tensors:
                last[id(tensor)] = number
        return last | {id(tensor): len(self.calls) for tensor in self.outputs}


def _numbered(calls: list, inputs: list) -> dict[int, tuple[keras.KerasTensor, int]]:
    """Returns for the id of each tensor the tensor and the number of the call that makes it."""
    made = {id(tensor): (tensor, -1) for tensor in inputs}
    for number, call in enumerate(calls):
        for tensor in call.outputs:
            made[id(tensor)] = (tensor, number)
    return made


def tensors_of(call: Any) -> list[keras.KerasTensor]:
    """Returns the tensors that a call reads, each once."""
    return list({id(tensor): tensor for tensor in call.input_tensors}.values())


def variables_of(call: Any, trainable: bool = False) -> list[keras.Variable]:
    """Returns the variables of a call: its layer's, and those among its arguments, each once.

    Args:
        call: A node of Keras.
        trainable: Whether to leave out those that training does not change by gradients.
    """
    arguments = keras.tree.flatten((call.arguments.args, call.arguments.kwargs))
    given = [argument for argument in arguments if isinstance(argument, keras.Variable)]
    if trainable:
        own = getattr(call.operation, "trainable_variables", ())
        given = [variable for variable in given if variable.trainable]
    else:
        own = getattr(call.operation, "variables", ())
    return list({id(variable): variable for variable in (*own, *given)}.values())


def function_of(model: keras.Model) -> keras.Model:
    """Returns the functional model that runs a model's graph.

    Raises:
        ValueError: If there is none.
    """
    fix = "Build it as keras.Model(inputs, outputs) from keras.Input, or as keras.Sequential."
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a keras.Model. Received: model={model!r}. {fix}")
    kind = type(model)
    if isinstance(model, keras.Sequential):
        if kind.call is not keras.Sequential.call:
            raise ValueError(
                f"A pipeline runs a Sequential model's layers one by one. Received: "
                f"{model.name!r} of the class {kind.__name__}, which overrides `call`. {fix}"
            )
        if model._functional is None:
            raise ValueError(
                f"A pipeline needs a Sequential model that knows its input. Received: "
                f"{model.name!r}, which does not. Begin it with keras.Input(shape), or call "
                f"`model.build(input_shape)` before."
            )
        return model._functional
    if not isinstance(model, keras.Function):
        raise ValueError(
            f"A pipeline needs a functional or Sequential model, whose graph of layers can be cut. "
            f"Received: {model.name!r} of the class {kind.__name__}, whose `call` is code. {fix}"
        )
    # Keras's class of functional models, which has no public name.
    functional = next(
        c
        for c in reversed(kind.__mro__)
        if issubclass(c, keras.Function) and issubclass(c, keras.Model)
    )
    if kind.call is not functional.call:
        raise ValueError(
            f"A pipeline runs the graph of a functional model. Received: {model.name!r} of the "
            f"class {kind.__name__}, which overrides `call` and so may do something else. {fix}"
        )
    return model
