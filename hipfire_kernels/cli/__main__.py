"""`python -m hipfire_kernels.cli`: the same as `hfk`."""

from hipfire_kernels.cli import main

main()
