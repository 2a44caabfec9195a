"""The small trained model that ships with dit-accel: its pictures, its prompts, its training and its checks."""
