"""The largest memory of a process."""


def peak() -> float:
    """Returns the largest memory of this process since the last call, in MB."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as counter:
        counter.write("5")
    return int(line.split()[1]) / 1024
