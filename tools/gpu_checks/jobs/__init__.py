"""Programs of the report's processes: each reports numbers, which the report compares."""
