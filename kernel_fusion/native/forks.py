"""Keeps a process from forking when the child, or the parent, would then wait forever."""

from __future__ import annotations

import os
import threading

# A fork waits for this: a half imported module would block the child, and the child's copy of a compiler's pipe the
# parent.
no_fork = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
