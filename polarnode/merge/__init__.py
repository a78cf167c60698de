"""Make training sequences from turns."""
