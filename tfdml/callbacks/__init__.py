"""Keras callbacks for training on several processes."""

from tfdml.callbacks.checkpoint.fault_tolerant_checkpoint import FaultTolerantCheckpoint
from tfdml.callbacks.chief_only import ChiefOnly
from tfdml.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdml.callbacks.optimizer_log import OptimizerLog
from tfdml.callbacks.outlier_monitor import OutlierMonitor
from tfdml.callbacks.performance_metrics import PerformanceMetrics
from tfdml.callbacks.prometheus_exporter import PrometheusExporter
from tfdml.callbacks.step_monitor import StepMonitor
from tfdml.callbacks.timeline import Timeline

__all__ = [
    "ChiefOnly",
    "FaultTolerantCheckpoint",
    "GradientNoiseScale",
    "OptimizerLog",
    "OutlierMonitor",
    "PerformanceMetrics",
    "PrometheusExporter",
    "StepMonitor",
    "Timeline",
]
