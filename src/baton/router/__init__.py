"""The global router: which pool a request goes to, and getting it there. It knows neither roles nor engines."""
