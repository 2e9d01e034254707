"""Load and launch: devices, bound arguments, the launches of an attention call, timing."""
