"""The command line, one module per command; `app` has them all. It needs typer and rich, the extra `cli`."""
