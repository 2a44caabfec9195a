"""Small trained models that ship with dit-accel: their scenes, prompts, training and checks."""
