"""What rules remember of a training: each follower sees one step after the other."""
