"""Keeps a process from forking while that would leave the child, or its parent, waiting for ever."""

from __future__ import annotations

import os
import threading

# A fork waits until this is free. A module that is half imported would keep the child waiting for ever; a compiler that
# is half started, whose pipe the child would have a copy of, the parent.
no_fork = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
