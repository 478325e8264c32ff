"""One package per backend; `select` chooses between them. A backend never imports another."""
