"""Collective operations that move tensors between the processes of a job."""
