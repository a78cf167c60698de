"""Harnesses, one module each: how the program is started and pointed at its model endpoint."""
