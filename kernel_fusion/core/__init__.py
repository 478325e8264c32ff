"""Shared by every layer: specs of what is computed, and checks of arguments."""
