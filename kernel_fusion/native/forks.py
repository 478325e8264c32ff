"""Delays forks after which the child or the parent would wait forever."""

from __future__ import annotations

import os
import threading

# The child would inherit a half imported module, or the pipe of the parent's compiler.
no_fork = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
