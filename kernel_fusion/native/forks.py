"""Forks that would make the child, or the parent, wait forever."""

from __future__ import annotations

import os
import threading

# Forks wait for this: the child would inherit a half imported module, or the pipe of the parent's compiler.
no_fork = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
