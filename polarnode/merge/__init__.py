"""Turns into training sequences."""
