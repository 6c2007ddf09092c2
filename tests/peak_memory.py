"""Code for a child process that says how much memory it took.

`ru_maxrss` will not do: a child begins with the peak of the process that started it, here of a whole test run.
"""

PEAK = r'''
def peak() -> int:
    """Kilobytes, at most, until now."""
    import pathlib, re, resource
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
'''
