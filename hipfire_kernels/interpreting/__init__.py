"""The machine code of gfx11 and gfx12, run without a card: what `isa:` devices are made of.

    listing -> decode -> program -> machine (C) -> findings

A listing is the compiler's assembly of a kernel, which assembles to the bytes of its code object. `machine/` is the
interpreter, `machine/table.h` the instructions it has.
"""
