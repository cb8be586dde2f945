"""Pipelines: a replica's step in microbatches, and its model in stages on several devices.

`microbatches` takes the place of a replica's step, as `step.compiled` does for XLA: each microbatch
is a share of the global batch, on which Keras's own step runs. Within it, `stages` runs the model's
graph, stage by stage, each as a function on its device; TensorFlow sends the tensors between them.
`task_order` gives each stage's calls the schedule's order. `placing` moves variables to the stages.
"""
