"""What every layer shares: the specs of what is computed and the checks of arguments."""
