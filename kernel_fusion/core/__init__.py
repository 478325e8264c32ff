"""What every layer of the package shares: specs, arguments and their checks, the disk cache."""
