"""Benchmark of embedding tables on every rank, or divided among ranks or servers."""
