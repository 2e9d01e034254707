"""Compile: toolchains, the artifact cache, what a kernel takes from the machine."""
