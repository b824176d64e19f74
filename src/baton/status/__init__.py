"""How a process reports its state: to the supervisor that started it, and on the terminal."""
