"""Keras callbacks for training on several processes."""

from tfdml.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdml.callbacks.optimizer_log import OptimizerLog
from tfdml.callbacks.step_monitor import StepMonitor

__all__ = ["GradientNoiseScale", "OptimizerLog", "StepMonitor"]
