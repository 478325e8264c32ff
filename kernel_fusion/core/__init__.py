"""Shared by every layer."""
