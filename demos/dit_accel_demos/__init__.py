"""Small trained models, a folder each; ``dit_accel.tools.demo`` finds them."""
