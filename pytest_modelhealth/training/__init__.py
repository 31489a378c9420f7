"""What is told of a training: many steps of the user's own loop, one after the other."""
