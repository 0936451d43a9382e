"""Fixtures that every suite may use."""
