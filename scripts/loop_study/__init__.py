"""The closed loop with knobs, for trying ideas before the package gets them."""
