"""The exit code by which the guard ends a process because another rank cannot go on."""

EXIT_CODE = 70
