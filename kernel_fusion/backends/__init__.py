"""One package per backend; `availability` says why one cannot run."""
