"""The system HTTP server: health, metrics, commands, and their OpenAPI document."""
