"""What is built on acceleration: measuring, tuning, comparing, drawing, and the models that ship."""
