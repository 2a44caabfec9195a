"""What measures and checks this project; each script says at its head what it answers."""
