"""What a seed decides beforehand: the kinds of worlds, what happens in them and what fails."""
