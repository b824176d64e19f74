"""What the documentation says, checked: its links, its commands, and the path of a newcomer."""
