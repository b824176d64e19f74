"""What crosses a wire, as frozen values. Imports nothing else of Baton."""
