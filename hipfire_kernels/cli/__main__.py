"""`python -m hipfire_kernels.cli`: the same as `hfk`."""

from . import main

main()
