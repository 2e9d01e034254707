"""HIP kernel sources: one Jinja template per kernel family, shared headers, one dialect per compiler."""
