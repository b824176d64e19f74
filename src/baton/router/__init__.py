"""The global router: selects a pool of workers for each request and forwards it. Knows neither handlers nor engines."""
