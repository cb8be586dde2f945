"""The chief's work: scheduling steps on workers, shipping datasets, collecting results."""
