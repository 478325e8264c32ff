"""One package per backend, and why one cannot run (`availability`). A backend never imports another."""
