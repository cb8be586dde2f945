"""Starting of a job's processes: locally, on hosts, and by schedulers' scripts."""
