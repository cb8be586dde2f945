"""The chief's work: scheduling steps on workers and collecting their metrics."""
