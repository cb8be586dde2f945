"""Keras callbacks for training on several processes."""

from tfdml.callbacks.step_monitor import StepMonitor

__all__ = ["StepMonitor"]
