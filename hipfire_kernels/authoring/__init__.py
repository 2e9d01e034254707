"""Declare and render: what a kernel family is made of, and its source."""
