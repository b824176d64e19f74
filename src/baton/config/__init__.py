"""Settings. The only reader of files of settings, environment variables and cache locations."""
