"""The child's side of the budgets: what it gives up at its start, and what a call may use.

CPU time is held by a profiling timer whose signal is left at its default, which ends the
process: it works in the middle of one long C call, where no Python handler would run.
Memory is the address space over what the child had when the call began.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
STATM = Path("/proc/self/statm")


def settle(parent: int) -> None:
    """Tie this process to its parent and give up for good what no task needs."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked to tell
        raise SystemExit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the parent had blocked
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer's: it must end the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to act on
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(what, (0, 0))


def address_space() -> int:
    """Bytes this process has mapped; 0 where the system does not say."""
    try:
        return int(STATM.read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def arm(cpu: float, memory: int, files: bool) -> None:
    """Start the budgets of one call; `files`: it may open some."""
    if base := address_space():
        soft(resource.RLIMIT_AS, base + memory)
    if not files:
        soft(resource.RLIMIT_NOFILE, 3)
    used = resource.getrusage(resource.RUSAGE_SELF)
    # the timer is what ends it; the kernel's limit in whole seconds is the net below
    soft(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + cpu) + 1)
    signal.setitimer(signal.ITIMER_PROF, cpu)


def disarm() -> None:
    """End the budgets of a call."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    for what in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU):
        soft(what, resource.RLIM_INFINITY)


def soft(what: int, value: int) -> None:
    """Set a soft limit, at most the hard one."""
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
        value = hard
    resource.setrlimit(what, (value, hard))
