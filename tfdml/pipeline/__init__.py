"""Pipeline parallelism: where a model is cut into stages, and what the stages cost."""
