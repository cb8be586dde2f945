"""What the report's processes run: each reports numbers, which the report compares."""
