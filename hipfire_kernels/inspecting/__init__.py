"""Look into a kernel: instructions, pressure, lint, comparison of two builds, watching a template."""
