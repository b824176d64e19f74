"""Reports the state of a process to its supervisor and on the terminal."""
