"""Keeps a process from forking when the child, or its parent, would then wait forever."""

from __future__ import annotations

import os
import threading

# A fork waits for this. A half imported module would block the child. A half started compiler would block the parent,
# because the child has a copy of its pipe.
no_fork = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
